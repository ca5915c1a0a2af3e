"""What a plan warns of before any step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tagc
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy


def unit(world_size: int, dtype: torch.dtype) -> UnitInfo:
    shape = (1024, 256)
    columns = shape[0] // world_size * shape[1]
    param = UnitParam(name="h.0.mlp.c_fc.weight", shape=shape, columns=columns)
    return UnitInfo(name="h.0", params=(param,), world_size=world_size, dtype=dtype)


def test_a_plan_that_sends_more_than_dense_says_so():
    """At 16 ranks and density 0.2 every group is in the union, at 16 bits an element."""
    plan = build_plan([unit(16, torch.bfloat16)], Policy.load("mlp-only"))
    (warning,) = plan.warnings
    assert "do not compress here" in warning
    assert f"- warning: {warning}" in str(plan)
    assert not build_plan([unit(2, torch.bfloat16)], Policy.load("mlp-only")).warnings


def test_a_dense_rule_that_matches_nothing_says_so():
    rules = [
        {"when": {"name": "*.lmhead.*"}, "codec": {"kind": "dense"}},
        {"when": {"role": "mlp"}, "codec": {"kind": "sketch", "density": 0.1}},
    ]
    plan = build_plan([unit(2, torch.float32)], Policy.load({"schema": 1, "gradients": rules}))
    (warning,) = plan.warnings
    assert "gradients[0] matches no parameter" in warning


def test_warnings_appear_at_the_users_line():
    """Whatever of the package lies between the user and the place that warns."""
    with pytest.warns(UserWarning, match="do not compress here") as caught:
        tagc.explain(
            {"h.0.mlp.c_fc.weight": (1024, 256)}, "mlp-only", world_size=16, dtype=torch.bfloat16
        )
    assert {Path(warning.filename) for warning in caught} == {Path(__file__)}


@pytest.mark.parametrize("density", [0.0001, 0.1])
def test_a_support_that_cannot_be_shared_is_noted(density: float):
    codec = {"kind": "packed", "density": density, "support": "shared"}
    rules = [{"when": {"role": "mlp"}, "codec": codec}]
    plan = build_plan([unit(2, torch.float32)], Policy.load({"schema": 1, "gradients": rules}))
    said = "h.0.mlp.c_fc.weight: fewer than 64 groups to keep, so every rank keeps its own"
    assert (said in str(plan)) == (density < 0.01)


@pytest.mark.parametrize(
    ("feedback", "said"),
    [
        ({"kind": "momentum"}, "set the optimizer's own first momentum to 0"),
        ({"kind": "residual", "lead": 0.5}, "a lead hands out noisier gradients"),
        ({"kind": "residual", "lead": 1}, None),
    ],
)
def test_what_an_optimizer_must_know_is_noted(feedback: dict[str, object], said: str | None):
    codec = {"kind": "quantized", "bits": 4}
    rules = [{"when": {"role": "mlp"}, "codec": codec, "feedback": feedback}]
    plan = build_plan([unit(2, torch.float32)], Policy.load({"schema": 1, "gradients": rules}))
    assert len(plan.notes) == (said is not None)
    assert said is None or said in str(plan)


@pytest.mark.parametrize(
    ("policy", "columns", "costly"), [("half-bit", 2048, 0), ("half-bit", 8, 1)]
)
def test_bits_far_beyond_those_of_the_code_are_noted(policy: str, columns: int, costly: int):
    """Codes for groups of 8 have 4 bits; scales of narrow rows cost more than these."""
    shapes = {"h.0.mlp.c_fc.weight": (8192, columns)}
    plan = tagc.explain(shapes, policy, world_size=4)
    assert sum("more than twice the bits of their codes" in note for note in plan.notes) == costly
