"""What a plan says: why parameters are dense, what it warns of, and which lines it merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tagc
from tagc.costs.explain import Setting
from tagc.costs.shapes import ModelShapes
from tagc.plan import Plan, UnitInfo, UnitParam, build_plan
from tagc.plan.table import Row, merged
from tagc.policy import Policy

SHAPES = {
    "embed_tokens.weight": (4096, 64),
    "layers.0.mlp.up_proj.weight": (256, 64),
    "layers.0.self_attn.q_proj.weight": (64, 64),
    "layers.0.self_attn.q_proj.bias": (64,),
    "layers.0.input_layernorm.weight": (64,),
    "layers.1.mlp.up_proj.weight": (256, 64),
    "layers.1.self_attn.q_proj.weight": (64, 64),
    "layers.1.self_attn.q_proj.bias": (64,),
    "layers.1.input_layernorm.weight": (64,),
}


def why(plan: Plan) -> dict[str, str]:
    return {row.param: row.why_dense for row in plan.rows}


def explained(*rules: dict[str, Any], **more: Any) -> Plan:
    return tagc.explain(SHAPES, {"schema": 1, "gradients": [*rules], **more}, world_size=2)


def test_every_dense_row_has_its_reason():
    plan = explained(
        {"when": {"role": "embedding"}, "codec": {"kind": "dense"}},
        {"when": {"role": ["attention", "mlp"]}, "codec": {"kind": "quantized"}},
    )
    text = why(plan)
    assert text.pop("embed_tokens.weight") == "rule gradients[0]"
    for i in range(2):
        assert text.pop(f"layers.{i}.mlp.up_proj.weight") == ""
        assert text.pop(f"layers.{i}.self_attn.q_proj.weight") == (
            "4,096 elements < 16,384: see min_numel"
        )
        assert text.pop(f"layers.{i}.self_attn.q_proj.bias") == "one dimension: no rule names it"
        assert text.pop(f"layers.{i}.input_layernorm.weight") == "no rule for its role"
    assert not text


def test_compressing_nothing_is_answered_with_number_and_key(tmp_path: Path):
    lora = {
        f"layers.{i}.self_attn.q_proj.lora_{x}.default.weight": shape
        for i in range(4)
        for x, shape in (("A", (8, 512)), ("B", (1024, 8)))
    }
    with pytest.raises(tagc.PolicyError) as caught:
        tagc.explain(lora | {"norm.weight": (512,)}, "one-bit", world_size=2)
    text = str(caught.value)
    assert "selects any of the 9 parameters" in text
    assert "lora_B.default.weight (attention, and 3 more): 8,192 elements < 16,384" in text
    assert "lora_A.default.weight (attention, and 3 more): 4,096 elements < 16,384" in text
    assert "norm.weight (norm): no rule for its role" in text
    assert "write `min_numel: 4096` under `when`" in text
    # The file below compresses all adapters, in FSDP and in DDP.
    file = tmp_path / "lora.yaml"
    file.write_text(text.partition(":\n")[2])
    assert file.read_text().startswith("schema: 1\nextends: one-bit\ngradients: [{when: {")
    for ddp in (False, True):
        plan = tagc.explain(lora, file, world_size=2, ddp=ddp)
        assert sum(row.why_dense == "" for row in plan.rows) == 8
        with pytest.raises(tagc.PolicyError, match="min_numel: 4096"):
            tagc.explain(lora, "one-bit", world_size=2, ddp=ddp)


def unit(world_size: int, dtype: torch.dtype) -> UnitInfo:
    shape = (1024, 256)
    columns = shape[0] // world_size * shape[1]
    param = UnitParam(name="h.0.mlp.c_fc.weight", shape=shape, columns=columns)
    return UnitInfo(name="h.0", params=(param,), world_size=world_size, dtype=dtype)


FOUR = {"kind": "quantized", "bits": 4}
SKETCH = Policy.load(
    {
        "schema": 1,
        "gradients": [{"when": {"role": "mlp"}, "codec": {"kind": "sketch", "density": 0.2}}],
    }
)


def test_a_plan_that_sends_more_than_dense_says_so():
    """At 32 ranks and density 0.2 every group is in the union, at 16 bits an element."""
    plan = build_plan([unit(32, torch.bfloat16)], SKETCH)
    (warning,) = plan.warnings
    assert "do not compress here" in warning
    assert f"- warning: {warning}" in str(plan)
    assert not build_plan([unit(2, torch.bfloat16)], SKETCH).warnings


@pytest.mark.parametrize(
    ("codec", "feedback", "shape", "text"),
    [
        (
            {"kind": "sketch", "density": 1e-4, "support": "shared"}, {}, (1024, 256),
            "fewer than 64 groups to keep, so every rank keeps its own",
        ),
        (FOUR, {"kind": "residual", "lead": 0.5}, (1024, 256), "a lead makes gradients noisier"),
        (FOUR, {"kind": "residual", "lead": 1}, (1024, 256), ""),
        ({"kind": "matrix"}, {}, (8192, 8), "more than twice the bits of their codes"),
    ],
)  # fmt: skip
def test_what_users_should_know_is_noted(
    codec: dict[str, Any], feedback: dict[str, Any], shape: tuple[int, int], text: str
):
    rules = [{"when": {"role": "mlp"}, "codec": codec, "feedback": feedback}]
    shapes = {"h.0.mlp.c_fc.weight": shape}
    plan = tagc.explain(shapes, {"schema": 1, "gradients": rules}, world_size=2)
    notes = "\n".join(plan.notes)
    for each in ("keeps its own", "noisier", "bits of their codes"):
        assert (each in notes) == (each in text)
    assert text in notes


def test_a_rule_without_parameters_says_why():
    rules = [{"when": {"role": "mlp"}, "codec": {"kind": "quantized"}}, {"when": {}, "codec": FOUR}]
    shapes = {"h.0.mlp.c_fc.weight": (8, 512), "h.0.attn.c_attn.weight": (512, 512)}
    text = r"gradients\[0\] matches no parameter of this model; nearest is .* see min_numel"
    with pytest.warns(UserWarning, match=text):
        tagc.explain(shapes, {"schema": 1, "gradients": rules}, world_size=2)
    shapes["h.0.mlp.c_fc.weight"] = (512, 512)
    text = r"gradients\[1\] matches .*: an earlier rule, gradients\[0\], takes h\.0\.mlp"
    with pytest.warns(UserWarning, match=text):
        tagc.explain(shapes, {"schema": 1, "gradients": rules[::-1]}, world_size=2)


def adapted(rank: int) -> nn.Module:
    """A frozen block with adapters, of 512 by ``rank`` elements, and a norm that is trained."""
    block = nn.Module()
    base = nn.Linear(512, 512, bias=False, dtype=torch.float32).requires_grad_(False)
    block.q_proj = nn.ModuleDict(
        {
            "base_layer": base,
            "lora_A": nn.Linear(512, rank, bias=False, dtype=torch.float32),
            "lora_B": nn.Linear(rank, 512, bias=False, dtype=torch.float32),
        }
    )
    block.norm = nn.LayerNorm(512, dtype=torch.float32)
    return nn.ModuleDict({"layers": nn.ModuleList([block])})


def rules(*gradients: dict[str, object]) -> dict[str, object]:
    """A policy that gathers the base in 8 bits, so that it compresses something."""
    gather = {"when": {}, "codec": {"kind": "quantized", "bits": 8}}
    return {"schema": 1, "gradients": [*gradients], "parameters": [gather]}


def warnings(model: nn.Module, policy: str | dict[str, object]) -> tuple[str, ...]:
    return Setting(shapes=ModelShapes.of(model), world_size=2).plan(Policy.load(policy)).warnings


@pytest.mark.parametrize("policy", ["hybrid", rules({"when": {}, "codec": FOUR})])
def test_adapters_that_stay_dense_are_a_warning(policy: str | dict[str, object]):
    warning = warnings(adapted(8), policy)[-1]
    assert (
        "leaves the gradients of 89% of the trained elements dense, in parameters with" in warning
    )
    assert "lora_A.weight, layers.0.q_proj.lora_B.weight. To compress" in warning
    assert "`min_numel: 4096` under `when` in a rule for gradients" in warning
    assert ("\nextends: hybrid\ngradients: [{when: {" in warning) == (policy == "hybrid")


@pytest.mark.parametrize(
    ("rank", "policy"),
    [
        (32, "hybrid"),  # 16,384 elements each
        (8, rules({"when": {"min_numel": 5000}, "codec": FOUR})),
        (8, rules({"when": {"name": "*lora*"}, "codec": {"kind": "dense"}})),
    ],
)
def test_what_a_rule_leaves_dense_on_purpose_is_no_warning(
    rank: int, policy: str | dict[str, object]
):
    assert not any("trained elements" in warning for warning in warnings(adapted(rank), policy))


# Parameters that differ in a number of their names only are one line


def row(param: str, unit: str = "(root)", **changes: Any) -> Row:
    values: dict[str, Any] = {
        "direction": "gradients", "shape": (4, 4), "role": "mlp", "codec": "dense",
        "density": 1.0, "dense_bytes": 64.0, "wire_bytes": 16.0, "stored_bytes": 8.0,
    }  # fmt: skip
    return Row(unit=unit, param=param, **(values | changes))


def test_blocks_are_one_line_with_the_bytes_of_all():
    """Only those that are alike, and only combinations of numbers that are all there."""
    rows = [row("embed.weight")]
    rows += [row(f"layers.{i}.wq.weight", f"layers.{i}") for i in range(33)]
    rows += [row(f"layers.{i}.wo", f"layers.{i}", wire_bytes=16 + i // 3) for i in range(4)]
    rows += [row(f"layers.{i}.experts.{e}.w1") for i in range(2) for e in range(3 - i)]
    assert [(r.unit, r.param, r.alike) for r in merged(rows)] == [
        ("(root)", "embed.weight", 1),
        ("layers.{0–32}", "layers.{0–32}.wq.weight", 33),
        ("layers.{0–2}", "layers.{0–2}.wo", 3),
        ("layers.3", "layers.3.wo", 1),
        ("(root)", "layers.{0–1}.experts.0.w1", 2),
        ("(root)", "layers.{0–1}.experts.1.w1", 2),
        ("(root)", "layers.0.experts.2.w1", 1),
    ]
    block = merged(rows)[1]
    assert (block.dense_bytes, block.wire_bytes, block.stored_bytes) == (33 * 64, 33 * 16, 33 * 8)


def test_a_plan_prints_blocks_once_and_all_of_them_in_full():
    shapes = {f"layers.{i}.mlp.w{k}.weight": (512, 256) for i in range(12) for k in "ab"}
    plan = tagc.explain(shapes | {"norm.weight": (256,)}, "loco-4bit", world_size=4)
    short, full = str(plan).splitlines(), plan.full.splitlines()
    assert len(full) - len(short) == 2 * 11
    assert short[-1].split() == full[-1].split()  # the totals
