"""An optimizer whose rates are kept: what it has outside of its step is the user's."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from tagc.handle.noise import (
    LearningRateScaling,
    NoiseFactors,
    _decays_apart,
    divides_by_second_moment,
)


class Fixed(NoiseFactors):
    """Factors that are known."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def agree(self) -> None: ...

    def by_parameter(self) -> dict[int, float]:
        return AnyParameter(self.factor)


class AnyParameter(dict[int, float]):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def get(self, key: int, default: Any = None) -> float:
        return self.factor


def rates(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    return [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups]


def stepping(**options: Any) -> tuple[Any, nn.Parameter]:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return torch.optim.AdamW([p], lr=0.5, weight_decay=0.25, **options), p


def failing() -> float:
    raise OSError("in the closure")


@pytest.mark.parametrize("scheduled", ["before", "after", "never"])
def test_an_exception_in_a_step_leaves_the_users_rates(scheduled: str) -> None:
    optimizer, _ = stepping()
    schedulers = []
    if scheduled == "before":
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
    kept = LearningRateScaling(optimizer, Fixed(2.0), second_moment=None)
    if scheduled == "after":
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
    with pytest.raises(OSError, match="in the closure"):
        optimizer.step(failing)
    assert rates(optimizer) == [(0.5, 0.25)]
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.125})
    optimizer.param_groups[0]["lr"] = 0.0625
    optimizer.step()
    assert rates(optimizer) == [(0.0625, 0.25), (0.125, 0.25)]
    assert kept.factors == [2.0, 2.0]
    for scheduler in schedulers:
        scheduler.step()
        assert rates(optimizer) == [(0.03125, 0.25), (0.0625, 0.25)]
    kept.remove()
    optimizer.step()
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_caller_that_kept_the_step_of_before() -> None:
    """Accelerate does, with a gradient scaler: no error can be seen, and still nothing is lost."""
    optimizer, p = stepping()
    step = optimizer.step
    kept = LearningRateScaling(optimizer, Fixed(2.0), second_moment=None)
    step()
    moved = float((1 - p[0]).detach())
    # By twice the rate; the decay is what it was.
    assert moved == pytest.approx(0.125 + 1.0, rel=1e-5)
    assert rates(optimizer) == [(0.5, 0.25)]
    with pytest.raises(OSError, match="in the closure"):
        step(failing)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    with pytest.raises(OSError, match="in the closure"):
        step(failing)
    optimizer.param_groups[0]["lr"] = 0.0625
    step()
    assert rates(optimizer) == [(0.0625, 0.25)]
    kept.remove()
    assert optimizer.step == step


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.tensor(0.5)
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([p], lr=rate, capturable=False, foreach=False)
    LearningRateScaling(optimizer, Fixed(2.0), second_moment=None)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_a_scaler_that_skips_steps() -> None:
    optimizer, p = stepping()
    LearningRateScaling(optimizer, Fixed(2.0), second_moment=None)
    scaler = torch.amp.GradScaler("cpu")
    for bad in (True, False):
        p.grad = torch.full_like(p, math.inf if bad else 1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        assert rates(optimizer) == [(0.5, 0.25)]


def decaying() -> list[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    """All of torch's optimizers with a decay whose rates are kept, in each of its forms."""
    found: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = []
    for cls in vars(torch.optim).values():
        if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
            continue
        options = inspect.signature(cls).parameters
        if "weight_decay" not in options:
            continue
        made: Any = cls
        probe = made([nn.Parameter(torch.ones(2, 2))], lr=0.01)
        if divides_by_second_moment(probe, None):
            found.append((cls, {}))
            if "decoupled_weight_decay" in options:
                found.append((cls, {"decoupled_weight_decay": True}))
    return found


@pytest.mark.parametrize(("cls", "options"), decaying(), ids=lambda x: getattr(x, "__name__", None))
def test_whether_a_decay_is_apart_is_what_the_optimizer_does(
    cls: Any, options: dict[str, Any]
) -> None:
    """Apart from the gradient it is the rate times the decay, and then it must not follow the
    factor."""
    p = nn.Parameter(torch.full((2, 2), 3.0))
    p.grad = torch.zeros(2, 2)
    optimizer = cls([p], lr=0.01, weight_decay=0.1, **options)
    for _ in range(10):  # in its first ones RAdam divides by nothing
        optimizer.step()
    left = p.detach()[0, 0].item() / 3
    apart = left == pytest.approx((1 - 0.01 * 0.1) ** 10, rel=1e-5)
    assert _decays_apart(optimizer, optimizer.param_groups[0]) == apart
    assert left < 1


def test_an_optimizer_that_chooses_its_rates_is_refused() -> None:
    optimizer, _ = stepping()
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="group 0 of AdamW has no learning rate to keep"):
        LearningRateScaling(optimizer, Fixed(2.0), second_moment=None)
    optimizer.param_groups[0].update(lr=0.1, relative_step=True)
    with pytest.raises(ValueError, match="relative_step=False"):
        LearningRateScaling(optimizer, Fixed(2.0), second_moment=None)
