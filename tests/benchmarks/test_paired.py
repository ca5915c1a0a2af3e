"""Paired seeds: which runs are made, what their differences say, and how runs train."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import suites
from benchmarks.convergence.recipe import FIRST, OPTIMIZERS, PAIRED, Lion, Recipe
from benchmarks.convergence.training import Run, Shape, train
from benchmarks.paired.intervals import Interval, difference
from benchmarks.paired.pairs import DENSE, LINES, Pairs, dense_rate, dense_run, line_run
from benchmarks.paired.report import table
from benchmarks.paired.settings import SETTINGS

BASE = next(iter(SETTINGS.values()))
BIT = LINES["1 bit"]


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


def made(best: float, gap: float, noise: float, **given: object) -> list[Run]:
    """Runs in their order, where dense is best at a rate, and a line's differences are ``gap``,
    changing by ``noise`` from seed to seed."""
    runs: list[Run] = []

    def loss(run: Run) -> float | None:
        if run not in runs:
            return None
        dense = 1 + abs(math.log(run.rate / best)) / 100 + run.seed / 10
        return dense if run.method is DENSE else dense * (1 + gap + noise * (-1) ** run.seed)

    pairs = Pairs(settings=[BASE], lines=[BIT], seeds=(3, 6), within=0.003, **given)  # pyright: ignore[reportArgumentType]
    while run := next(pairs.next_runs(loss), None):
        assert run not in runs
        runs.append(run)
    return runs


def test_a_line_is_run_at_denses_best_rate_with_as_many_seeds_as_it_needs() -> None:
    runs = made(9e-3, gap=0.01, noise=0.0001)
    assert [run.rate for run in runs[:3]] == list(BASE.rates)
    assert {run.rate for run in runs[3:]} == {9e-3}
    assert [(run.method.name, run.seed) for run in runs[3:]] == [
        (BIT.method.name, 0),
        ("dense", 1),
        (BIT.method.name, 1),
        ("dense", 2),
        (BIT.method.name, 2),
    ]
    assert all(run.recipe.kept == (run.method is not DENSE) for run in runs)
    # A noise of 1% needs more than six pairs for 0.3%.
    assert max(run.seed for run in made(9e-3, gap=0.0, noise=0.01)) == 5
    # And a rate below those of the start is found.
    assert {run.rate for run in made(4.5e-3, gap=0.0, noise=0.0)[5:]} == {4.5e-3}


def test_the_table_says_what_is_equal() -> None:
    def record(run: Run, loss: float | None) -> dict[str, object]:
        return {"suite": "paired", "run": run.key, "loss": loss}

    records = [record(dense_run(BASE, rate, 0), 2.0 + abs(rate - 9e-3)) for rate in BASE.rates] + [
        record(dense_run(BASE, 9e-3, seed), 2.0) for seed in (1, 2)
    ]
    for line, losses in (("1 bit", (2.012, 1.99, 2.0)), ("2 bits", (2.1, 2.1001, 2.1))):
        records += [
            record(line_run(BASE, LINES[line], 9e-3, seed), loss)
            for seed, loss in enumerate(losses)
        ]
    head, _, dense, *lines = table(records).splitlines()
    assert {line.count("|") for line in (head, dense, *lines)} == {7}
    assert dense.endswith("| 0.009 | dense | 2.0000 (3) |")
    assert lines[1].endswith("| 1 bit | = +0.03% ± 1.37 (3) |")
    assert lines[0].endswith("| 2 bits | +5.00% ± 0.01 (3) |")


def test_settings_change_one_thing() -> None:
    assert len(SETTINGS) == len({(s.shape, s.steps, s.recipe) for s in SETTINGS.values()})
    for setting in SETTINGS.values():
        # A sweep can begin.
        runs, rate = dense_rate(setting, lambda run: None)
        assert len(runs) >= min(3, setting.max_rates)
        assert rate is None
        assert setting.recipe.floor == 0


def test_records_of_the_first_recipe_stay_its() -> None:
    assert FIRST.key == {}
    assert replace(FIRST, clip=None).key == {"clip": None}
    assert set(PAIRED.key) == {"floor", "windows", "averaged"}


def test_the_rate_decays_to_zero_and_the_last_evaluations_count() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    schedule = PAIRED.schedule(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(rates) == 2
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] < 2e-3
    assert PAIRED.last_evaluations(100) == [96, 98, 100]
    assert FIRST.last_evaluations(100) == [100]


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


SMALL = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains(optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer, windows=8, averaged=2, kept=True, clip=None)
    said = train(Run(method=BIT.method, shape=SMALL, steps=3, rate=1e-3, seed=0, recipe=recipe))
    assert said["loss"] is not None


def test_kept_rates_make_larger_steps() -> None:
    """Of noisier gradients: without, a step is smaller by the factor that is undone."""
    recipe = replace(PAIRED, windows=8, averaged=1)
    losses = {
        kept: train(
            Run(
                method=LINES["1 of 8"].method,
                shape=SMALL,
                steps=40,
                rate=1e-2,
                seed=0,
                recipe=replace(recipe, kept=kept),
            )
        )["losses"]["40"]
        for kept in (False, True)
    }
    assert losses[True] < losses[False]


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert suites.main(["paired", "--settings", "Moon", "--lines", "1 bit; 3 bits"]) == 2
    said = capsys.readouterr().err
    assert "'Moon'" in said
    assert "'3 bits'" in said
    assert suites.main(["paired", "--seeds", "1", "2"]) == 2
    assert "needs 2 at least" in capsys.readouterr().err
