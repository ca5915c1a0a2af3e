"""What a plan warns of before any step."""

from __future__ import annotations

import warnings

import pytest
import torch

from tagc.plan import UnitInfo, UnitParam
from tagc.planning import build_plan
from tagc.policy import Policy


def unit(world_size: int, dtype: torch.dtype) -> UnitInfo:
    shape = (1024, 256)
    columns = shape[0] // world_size * shape[1]
    param = UnitParam(name="h.0.mlp.c_fc.weight", shape=shape, columns=columns)
    return UnitInfo(name="h.0", params=(param,), world_size=world_size, dtype=dtype)


def test_a_plan_that_sends_more_than_dense_says_so():
    """At 16 ranks and density 0.2 every group is in the union, at 16 bits an element."""
    with pytest.warns(UserWarning, match="do not compress here"):
        build_plan([unit(16, torch.bfloat16)], Policy.load("mlp-only"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_plan([unit(2, torch.bfloat16)], Policy.load("mlp-only"))


def test_a_dense_rule_that_matches_nothing_says_so():
    rules = [
        {"when": {"name": "*.lmhead.*"}, "codec": {"kind": "dense"}},
        {"when": {"role": "mlp"}, "codec": {"kind": "sketch", "density": 0.1}},
    ]
    with pytest.warns(UserWarning, match=r"gradients\[0\] matches no parameter"):
        build_plan([unit(2, torch.float32)], Policy.load({"schema": 1, "gradients": rules}))


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
