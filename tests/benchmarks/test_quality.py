"""Which runs the comparisons of quality make, and what their tables say; no training."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.quality.runs import (
    Comparison,
    sweep_runs,
)
from benchmarks.quality.settings import (
    DENSE,
    GRID,
    LINES,
    METHODS,
    Run,
    Shape,
    method_of,
)
from benchmarks.quality.training import Lion
from tagc.policy import Policy

SHAPE = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)
METHOD = method_of("matrix, 1 of 8")


def made(comparison: Comparison, loss_of: Callable[[Run], float]) -> list[Run]:
    """The runs in their order, where each ends at a loss."""
    runs: list[Run] = []
    while run := next(comparison(lambda run: loss_of(run) if run in runs else None), None):
        assert run not in runs
        runs.append(run)
    return runs


def swept(best: float, **given: Any) -> list[tuple[float, int]]:
    """Rates and seeds in the order of a sweep whose loss is least at ``best``."""
    runs = partial(sweep_runs, methods=[METHOD.name], shape=SHAPE, steps=[4], seeds=2, **given)

    def loss(run: Run) -> float:
        distance = abs(math.log(run.rate / best))
        return distance if distance < 2 else math.inf

    return [(run.rate, run.seed) for run in made(runs, loss)]


def test_a_sweep_goes_on_until_the_best_lies_between_others() -> None:
    start = [(rate, 0) for rate in METHOD.rates]
    middle = METHOD.rates[1]
    assert swept(middle) == [*start, (middle, 1)]
    lower = list(reversed([rate for rate in GRID if rate < METHOD.rates[0]]))
    assert swept(lower[1]) == [*start, *((rate, 0) for rate in lower[:3]), (lower[1], 1)]
    assert swept(lower[1], max_rates=4) == [*start, (lower[0], 0), (lower[0], 1)]
    assert swept(GRID[-1], max_rates=len(GRID))[-2:] == [(GRID[-1], 0), (GRID[-1], 1)]


SITES = (
    "sites, every step, 4 bits",
    "sites, every 32, 2 bits, outer momentum 0.5, together 500",
    "sites, every 32, 1 bit, no feedback, delay 4",
)


@pytest.mark.parametrize("name", [*METHODS, *LINES, *SITES])
def test_every_name_has_a_policy_and_rates_to_begin_with(name: str) -> None:
    method = method_of(name)
    at = [GRID.index(rate) for rate in method.rates]
    assert len(at) >= 3
    assert at == list(range(at[0], at[0] + len(at)))
    assert (method.policy is None) == (method == DENSE or method.powersgd is not None)
    assert method.in_sites == name.startswith("sites")
    if method.policy is not None:
        Policy.load(method.policy)


def test_lion_is_the_papers() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    w, m = p.detach().clone(), torch.zeros(5)
    for _ in range(4):
        g = torch.randn(5)
        p.grad = g.clone()
        optimizer.step()
        w -= 0.1 * ((0.9 * m + 0.1 * g).sign() + 0.5 * w)
        m = 0.99 * m + 0.01 * g
        torch.testing.assert_close(p.detach(), w, rtol=0, atol=1e-6)
