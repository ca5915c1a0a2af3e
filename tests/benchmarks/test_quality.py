"""Which runs the comparisons of quality make, and what their tables say; no training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.quality.report import Interval, difference, table
from benchmarks.quality.runs import (
    Comparison,
    dense_rate,
    losses_of,
    paired_runs,
    results_of,
    sweep_runs,
)
from benchmarks.quality.settings import (
    DENSE,
    GRID,
    LINES,
    METHODS,
    NANO,
    NANO_RECIPE,
    PAIRED,
    SETTINGS,
    Recipe,
    Run,
    Shape,
    method_of,
)
from benchmarks.quality.training import Lion, factor
from tagc.policy import Policy

SHAPE = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)
METHOD = method_of("matrix, 1 of 8")
BASE = next(iter(SETTINGS.values()))
BIT = method_of("1 bit")


def test_the_interval_is_students() -> None:
    # Differences of 1%, 2% and 3%: their standard deviation is 1%, t for 2 degrees 4.303.
    found = difference({0: 1.01, 1: 2.04, 2: 1.03, 9: 7.0}, {0: 1.0, 1: 2.0, 2: 1.0, 8: 1.0})
    assert found is not None
    assert (found.mean, found.half, found.pairs) == pytest.approx((0.02, 4.303e-2 / 3**0.5, 3))
    assert found.is_zero
    assert str(found) == "+2.00% ± 2.48 (3)"
    assert str(difference({0: 0.99}, {0: 1.0})) == "-1.00% (1)"
    assert difference({0: 1.0}, {1: 1.0}) is None
    diverged = difference({0: math.inf, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert diverged is not None
    assert not diverged.is_zero
    assert not Interval(0.02, 0.01, 3).is_zero


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


def paired(best: float, gap: float, noise: float) -> list[Run]:
    """The runs where dense is best at a rate, and a line's differences are ``gap``, changing by
    ``noise`` from seed to seed."""

    def loss(run: Run) -> float:
        dense = 1 + abs(math.log(run.rate / best)) / 100 + run.seed / 10
        return dense if run.method == DENSE else dense * (1 + gap + noise * (-1) ** run.seed)

    lines = {"settings": [BASE], "lines": ["1 bit"], "kept": True}
    return made(partial(paired_runs, **lines, seeds=(3, 6), within=0.003), loss)


def test_pairs_go_on_until_the_interval_is_narrow() -> None:
    runs = paired(9e-3, gap=0.1, noise=0.0)
    sweep, pairs = runs[: len(BASE.rates)], runs[len(BASE.rates) :]
    assert [(run.rate, run.seed) for run in sweep] == [(rate, 0) for rate in BASE.rates]
    assert all(run.method == DENSE for run in sweep)
    # Dense of the first seed is there already.
    assert [(run.method == DENSE, run.seed) for run in pairs] == [
        (False, 0),
        (True, 1),
        (False, 1),
        (True, 2),
        (False, 2),
    ]
    assert all(run.recipe.kept == (run.method != DENSE) for run in runs)
    # A noise of 1% needs more than six pairs for 0.3%.
    assert max(run.seed for run in paired(9e-3, gap=0.0, noise=0.01)) == 5
    # And a rate below those of the start is found.
    assert {run.rate for run in paired(4.5e-3, gap=0.0, noise=0.0)[5:]} == {4.5e-3}


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


def test_names_say_what_is_sent() -> None:
    policy: Any = method_of("matrix, 1 bit, measured lead, changes in 2 bits").policy
    (rule,) = policy["gradients"]
    assert rule["codec"] == {"kind": "matrix", "level": 1.3}
    assert rule["feedback"] == {"kind": "residual", "lead": "measured", "dtype": "float32"}
    assert policy["parameters"][0]["codec"] == {"kind": "delta", "bits": 2}
    stateless: Any = method_of("4 bits in blocks of 32, stateless").policy
    codec = {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"}
    assert stateless["gradients"][0]["codec"] == codec
    sites: Any = method_of(SITES[1]).policy
    assert sites["sites"] == {
        "every": 32,
        "outer": {"rate": 0.7, "momentum": 0.5},
        "together": 500,
    }
    for wrong in ("matrix, 1 bit, no such thing", "sites, every 32, 3 bits"):
        with pytest.raises(ValueError, match="unknown"):
            method_of(wrong)


def test_settings_change_one_thing() -> None:
    assert len(SETTINGS) == len({(s.shape, s.steps, s.recipe) for s in SETTINGS.values()})
    for setting in SETTINGS.values():
        runs, rate = dense_rate(setting, lambda run: None)
        assert len(runs) >= min(3, setting.max_rates)
        assert rate is None
        assert setting.recipe.floor == 0


def run_of(rate: float, **recipe: Any) -> Run:
    return Run(method=METHOD, shape=SHAPE, steps=4, rate=rate, recipe=Recipe(**recipe))


def test_a_run_that_diverged_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results = results_of("sweep", file)
    assert losses_of(results)(run_of(1.0)) is None
    results.add(run_of(1.0).key, {"loss": None})
    results.add(run_of(2.0).key, {"loss": 1.0}, write=False)
    assert losses_of(results)(run_of(2.0)) == 1.0
    again = losses_of(results_of("sweep", file))
    assert again(run_of(1.0)) == math.inf
    assert again(run_of(2.0)) is None
    assert again(run_of(1.0, clip=None)) is None
    # Those of another comparison are not its.
    assert losses_of(results_of("paired", file))(run_of(1.0)) is None


def record(comparison: str, run: Run, loss: float, norms: list[float]) -> dict[str, Any]:
    head = {"suite": "quality", "comparison": comparison, "method": run.method.name}
    said = {"parameters": 100_000, "bits": 4.0, "losses": {"1": 3.0, "4": loss}, "norms": norms}
    return head | {"run": run.key, "loss": loss} | said


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_pairs_says_what_is_equal() -> None:
    def of(method: Any, rate: float, seed: int, loss: float) -> dict[str, Any]:
        run = BASE.run(method, rate, seed, kept=method is not DENSE)
        return record("paired", run, loss, [])

    records = [of(DENSE, rate, 0, 2.0 + abs(rate - 9e-3)) for rate in BASE.rates]
    records += [of(DENSE, 9e-3, seed, 2.0) for seed in (1, 2)]
    for line, losses in (("1 bit", (2.012, 1.99, 2.0)), ("2 bits", (2.1, 2.1001, 2.1))):
        records += [of(method_of(line), 9e-3, s, loss) for s, loss in enumerate(losses)]
    # A method that is no longer there keeps its name.
    records.append(of(replace(BIT, name="gone"), 9e-3, 0, 3.0))
    _, _, dense, *lines = table(records).splitlines()
    assert cells(dense)[0] == BASE.name
    assert cells(dense)[3:] == ["0.009", "dense", "2.0000 (3)"]
    assert [cells(line)[4:] for line in lines] == [
        ["2 bits", "+5.00% ± 0.01 (3)"],
        ["1 bit", "= +0.03% ± 1.37 (3)"],
        ["gone", "+50.00% (1)"],
    ]


def test_the_table_of_a_sweep_takes_the_best_rate_of_the_first_seed() -> None:
    def of(method: Any, rate: float, seed: int, loss: float) -> dict[str, Any]:
        run = Run(method=method, shape=SHAPE, steps=4, rate=rate, seed=seed)
        return record("sweep", run, loss, [])

    records = [of(DENSE, rate, 0, loss) for rate, loss in ((1e-3, 2.0), (2e-3, 1.0), (3e-3, 4.0))]
    records += [of(DENSE, 2e-3, 1, 1.2), of(METHOD, 2e-3, 0, 1.1)]
    title, _, _, _, *rows = table(records).splitlines()
    assert title == "0.10 M parameters, 2 ranks of 2 × 16 bytes, 4 steps"
    assert [cells(row) for row in rows] == [
        ["dense", "4.00", "", "0.002", "1.1000", "0.2000", "2", ""],
        [METHOD.name, "4.00", "", "0.002*", "1.1000", "", "1", "+10.00%"],
    ]


def test_the_table_of_policies_compares_norms_in_the_second_half() -> None:
    def of(policy: str, loss: float, norms: list[float]) -> dict[str, Any]:
        method = replace(DENSE, name=policy, policy=None if policy == "dense" else policy)
        run = Run(method=method, shape=NANO, steps=4, rate=1e-3, recipe=NANO_RECIPE)
        return record("untuned", run, loss, norms)

    _, _, *rows = table(
        [of("dense", 2.0, [9, 9, 1, 1]), of("one-bit", 2.2, [0, 0, 2, 4])]
    ).splitlines()
    assert [cells(row) for row in rows] == [
        ["dense", "0.001", "1", "2.0000", "0.0000", "1", "", "1.00", "50%"],
        ["one-bit", "0.001", "1", "2.2000", "0.0000", "1", "+10.0%", "3.00", "50%"],
    ]


def test_the_rate_decays_to_zero_and_the_last_evaluations_count() -> None:
    rates = [2 * factor(step, 100, PAIRED.floor) for step in range(100)]
    assert max(rates) == 2
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] < 2e-3
    assert PAIRED.last_evaluations(100) == [96, 98, 100]
    assert Recipe().last_evaluations(100) == [100]


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
