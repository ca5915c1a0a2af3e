"""What a plan says of parameters that no rule compresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tagc
from tagc.codecs import Special
from tagc.costs.link import Link
from tagc.plan import Plan, UnitInfo, UnitParam, build_plan
from tagc.policy import Policy, PolicyError

DENSE = [{"when": {}, "codec": {"kind": "dense"}}]
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


def test_what_codec_auto_left_dense():
    rules = [{"when": {"role": "mlp"}, "codec": {"kind": "auto", "min_bits": 32}}]
    link = Link(bandwidth=1e9)
    plan = tagc.explain(SHAPES, {"schema": 1, "gradients": rules}, world_size=2, link=link)
    assert why(plan)["layers.0.mlp.up_proj.weight"] == "chosen by codec auto"


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


def test_the_rest_as_bfloat16_is_not_all_that_was_asked_for():
    named = {f"layers.{i}.mine.weight": (512, 512) for i in range(3)}
    with pytest.raises(tagc.PolicyError) as caught:
        tagc.explain(named, "attn-only", world_size=2)
    text = str(caught.value)
    assert "compresses nothing in this model" in text
    assert "to send all as bfloat16, keep only that rule; to compress nothing" in text
    assert "none of its rules (gradients[0], parameters[0]) selects any of the 3" in text
    assert "layers.0.mine.weight (other, and 2 more): no rule for its role" in text
    assert "under `roles` in a policy that extends this one" in text
    half = {"when": {}, "codec": {"kind": "dense", "wire": "bfloat16"}}
    tagc.explain(named, {"schema": 1, "gradients": [half]}, world_size=2)


def test_vectors_alone_are_answered_with_a_name():
    with pytest.raises(tagc.PolicyError, match=r"write `name: layers\.0\.b` under `when`"):
        tagc.explain({"layers.0.b": (99999,)}, "loco-4bit", world_size=2)


def test_roles_of_the_policy_reach_the_plan():
    rule = {"when": {"role": "head"}, "codec": {"kind": "quantized"}}
    plan = explained(rule, roles={"head": ["embed_*", "layers.1.mlp.*"], "norm": "layers.0.*"})
    rows = {row.param: row for row in plan.rows}
    for name in ("embed_tokens.weight", "layers.1.mlp.up_proj.weight"):
        assert (rows[name].role, rows[name].why_dense) == ("head", "")
    assert rows["layers.0.mlp.up_proj.weight"].role == "norm"
    assert rows["layers.1.self_attn.q_proj.weight"].role == "attention"


def test_frozen_values_that_few_bits_cannot_carry_are_a_reason():
    param = UnitParam(
        name="mask", shape=(256, 256), columns=32768, frozen=True, special=Special.NOT_FINITE
    )
    unit = UnitInfo(name="", params=(param,), world_size=2, dtype=torch.float32)
    rules = [{"when": {"name": "*"}, "codec": {"kind": "quantized"}}]
    policy = Policy.load({"schema": 1, "gradients": DENSE, "parameters": rules})
    with pytest.raises(PolicyError, match="frozen, with values that are not finite"):
        build_plan([], policy, gathers=[unit])
