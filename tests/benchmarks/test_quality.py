"""Which runs the comparisons of quality make, and what their tables say; no training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import suites
from benchmarks.quality.intervals import Interval, difference
from benchmarks.quality.methods import DENSE, GRID, LINES, METHODS
from benchmarks.quality.optimizers import Lion, factor
from benchmarks.quality.report import plots, table
from benchmarks.quality.runs import Comparison, Pairs, Results, Sweep, dense_rate
from benchmarks.quality.settings import NANO, NANO_RECIPE, PAIRED, SETTINGS, Recipe, Run, Shape
from benchmarks.records import read
from support.paths import ROOT
from tagc.policy import Policy

RESULTS = ROOT / "benchmarks" / "results"
SHAPE = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)
METHOD = METHODS["matrix, 1 of 8"]
BASE = next(iter(SETTINGS.values()))
BIT = METHODS[LINES["1 bit"]]


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
    while run := next(
        comparison.next_runs(lambda run: loss_of(run) if run in runs else None), None
    ):
        assert run not in runs
        runs.append(run)
    return runs


def swept(best: float, **given: Any) -> list[tuple[float, int]]:
    """Rates and seeds in the order of a sweep whose loss is least at ``best``."""
    runs = Sweep(methods=[METHOD], shape=SHAPE, steps=[4], seeds=2, **given)

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
        return dense if run.method is DENSE else dense * (1 + gap + noise * (-1) ** run.seed)

    pairs = Pairs(settings=[BASE], lines=["1 bit"], kept=True, seeds=(3, 6), within=0.003)
    return made(pairs, loss)


def test_a_line_is_run_at_denses_best_rate_with_as_many_seeds_as_it_needs() -> None:
    runs = paired(9e-3, gap=0.01, noise=0.0001)
    assert [run.rate for run in runs[:3]] == list(BASE.rates)
    assert {run.rate for run in runs[3:]} == {9e-3}
    assert [(run.method.name, run.seed) for run in runs[3:]] == [
        (BIT.name, 0),
        ("dense", 1),
        (BIT.name, 1),
        ("dense", 2),
        (BIT.name, 2),
    ]
    assert all(run.recipe.kept == (run.method is not DENSE) for run in runs)
    # A noise of 1% needs more than six pairs for 0.3%.
    assert max(run.seed for run in paired(9e-3, gap=0.0, noise=0.01)) == 5
    # And a rate below those of the start is found.
    assert {run.rate for run in paired(4.5e-3, gap=0.0, noise=0.0)[5:]} == {4.5e-3}


def test_every_method_has_a_policy_and_rates_to_begin_with() -> None:
    for method in METHODS.values():
        at = [GRID.index(rate) for rate in method.rates]
        assert len(at) >= 3
        assert at == list(range(at[0], at[0] + len(at)))
        assert (method.policy is None) == (method is DENSE or method.powersgd is not None)
        if method.policy is not None:
            Policy.load(method.policy)
    assert set(LINES.values()) <= METHODS.keys()


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
    file, facts = tmp_path / "results.jsonl", {"suite": "quality", "comparison": "sweep"}
    results = Results(file, facts)
    assert results.loss(run_of(1.0)) is None
    results.add(run_of(1.0), {"loss": None})
    results.add(run_of(2.0), {"loss": 1.0}, write=False)
    assert results.loss(run_of(2.0)) == 1.0
    again = Results(file, facts)
    assert again.loss(run_of(1.0)) == math.inf
    assert again.loss(run_of(2.0)) is None
    assert again.loss(run_of(1.0, clip=None)) is None
    # Those of another comparison are not its.
    assert Results(file, facts | {"comparison": "paired"}).loss(run_of(1.0)) is None


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
        records += [of(METHODS[LINES[line]], 9e-3, s, loss) for s, loss in enumerate(losses)]
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


def test_the_table_of_a_sweep_takes_the_best_rate_of_the_first_seed(tmp_path: Path) -> None:
    def of(method: str, rate: float, seed: int, loss: float) -> dict[str, Any]:
        run = Run(method=METHODS[method], shape=SHAPE, steps=4, rate=rate, seed=seed)
        return record("sweep", run, loss, [])

    records = [of("dense", rate, 0, loss) for rate, loss in ((1e-3, 2.0), (2e-3, 1.0), (3e-3, 4.0))]
    records += [of("dense", 2e-3, 1, 1.2), of(METHOD.name, 2e-3, 0, 1.1)]
    title, _, _, _, *rows = table(records).splitlines()
    assert title == "0.10 M parameters, 2 ranks of 2 × 16 bytes, 4 steps"
    assert [cells(row) for row in rows] == [
        ["dense", "4.00", "", "0.002", "1.1000", "0.2000", "2", ""],
        [METHOD.name, "4.00", "", "0.002*", "1.1000", "", "1", "+10.00%"],
    ]
    files = plots(records, tmp_path)
    assert [file.name for file in files] == ["convergence-bits.png", "convergence-steps.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_the_table_of_policies_compares_norms_in_the_second_half() -> None:
    def of(policy: str, seed: int, rate: float, loss: float, norms: list[float]) -> dict[str, Any]:
        method = replace(DENSE, name=policy, policy=None if policy == "dense" else policy)
        run = Run(method=method, shape=NANO, steps=4, rate=rate, seed=seed, recipe=NANO_RECIPE)
        return record("untuned", run, loss, norms)

    rows = table(
        [
            of("dense", 0, 1e-3, 2.0, [9, 9, 1, 1]),
            of("dense", 1, 1e-3, 4.0, [9, 9, 2, 2]),
            of("one-bit", 0, 1e-3, 2.2, [0, 0, 2, 4]),
            of("one-bit", 1, 1e-3, 4.0, [0, 0, 4, 6]),
            of("one-bit", 0, 2e-3, 1.9, [0, 0, 1, 0.5]),
        ]
    ).splitlines()
    assert [cells(row) for row in rows[2:]] == [
        ["dense", "0.001", "1", "3.0000", "2.0000", "2", "", "1.00", "75%"],
        ["one-bit", "0.001", "1", "3.1000", "1.8000", "2", "+5.0%", "2.75", "50%"],
        ["one-bit", "0.002", "1", "1.9000", "0.0000", "1", "-5.0%", "0.75", "0%"],
    ]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("convergence", "| matrix, 1 bit | 1.12 |  | 0.006 | 1.2309 | 0.0021 | 3 | -0.25% |"),
        ("convergence-small", "| 4 bits, momentum | 4.06 |  | 0.002 | 1.7851 |  | 1 | +0.67% |"),
        ("paired", "| 1 of 8, measured lead | -1.90% ± 0.50 (5) |"),
        ("untuned", "| one-bit | 0.001 | 1 | 2.4520 | 0.0000 | 1 | +0.4% | 1.72 | 100% |"),
    ],
)
def test_committed_records_print_what_the_docs_say(file: str, said: str) -> None:
    assert said in table(read([RESULTS / f"{file}.jsonl"]))


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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("paired --settings Moon", "unknown: Moon"),
        ("paired --lines 1bit", "unknown: 1bit"),
        ("sweep --methods nothing", "unknown: nothing"),
        ("sweep --width 48", "--width 48: not a multiple of 32"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suites.main(["quality", *command.split(maxsplit=3)]) == 2
    assert said in capsys.readouterr().err
