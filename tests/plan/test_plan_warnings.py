"""What a plan warns of before any step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tagc
from tagc.costs.explain import plan_shapes
from tagc.costs.shapes import ModelShapes
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy


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


def test_a_rule_whose_parameters_are_too_small_says_so():
    rules = [{"when": {"role": "mlp"}, "codec": {"kind": "quantized"}}, {"when": {}, "codec": FOUR}]
    shapes = {"h.0.mlp.c_fc.weight": (8, 512), "h.0.attn.c_attn.weight": (512, 512)}
    text = (
        r"gradients\[0\] matches no parameter of this model; nearest is h.0.mlp.c_fc.weight: 4,096 "
        "elements < 16,384: see min_numel"
    )
    with pytest.warns(UserWarning, match=text):
        tagc.explain(shapes, {"schema": 1, "gradients": rules}, world_size=2)


@pytest.mark.parametrize("density", [0.0001, 0.1])
def test_a_support_that_cannot_be_shared_is_noted(density: float):
    codec = {"kind": "sketch", "density": density, "support": "shared"}
    rules = [{"when": {"role": "mlp"}, "codec": codec}]
    plan = build_plan([unit(2, torch.float32)], Policy.load({"schema": 1, "gradients": rules}))
    text = "h.0.mlp.c_fc.weight: fewer than 64 groups to keep, so every rank keeps its own"
    assert (text in str(plan)) == (density < 0.01)


@pytest.mark.parametrize(
    ("feedback", "text"),
    [
        ({"kind": "residual", "lead": 0.5}, "a lead makes gradients noisier"),
        ({"kind": "residual", "lead": 1}, None),
    ],
)
def test_what_an_optimizer_must_know_is_noted(feedback: dict[str, object], text: str | None):
    codec = {"kind": "quantized", "bits": 4}
    rules = [{"when": {"role": "mlp"}, "codec": codec, "feedback": feedback}]
    plan = build_plan([unit(2, torch.float32)], Policy.load({"schema": 1, "gradients": rules}))
    assert len(plan.notes) == (text is not None)
    assert text is None or text in str(plan)


@pytest.mark.parametrize(
    ("policy", "columns", "costly"), [("half-bit", 2048, 0), ("half-bit", 8, 1)]
)
def test_bits_far_beyond_those_of_the_code_are_noted(policy: str, columns: int, costly: int):
    """Codes for groups of 8 have 4 bits; scales of narrow rows cost more than these."""
    shapes = {"h.0.mlp.c_fc.weight": (8192, columns)}
    plan = tagc.explain(shapes, policy, world_size=4)
    assert sum("more than twice the bits of their codes" in note for note in plan.notes) == costly


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
    plan = plan_shapes(
        ModelShapes.of(model),
        Policy.load(policy),
        world_size=2,
        replicas=1,
        dtype=torch.float32,
        parameter_dtype=torch.bfloat16,
        choose=None,
    )
    return plan.warnings


@pytest.mark.parametrize("policy", ["hybrid", rules({"when": {}, "codec": FOUR})])
def test_adapters_that_stay_dense_are_told(policy: str | dict[str, object]):
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
        (8, rules({"when": {}, "codec": FOUR}, {"when": {}, "codec": {"kind": "dense"}})),
        (8, "dense"),
    ],
)
def test_what_a_rule_leaves_dense_on_purpose_is_not_told(
    rank: int, policy: str | dict[str, object]
):
    assert not any("trained elements" in warning for warning in warnings(adapted(rank), policy))
