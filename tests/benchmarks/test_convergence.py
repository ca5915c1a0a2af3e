"""The convergence benchmark: simulated ranks are ranks, and a sweep finds the best rate."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import suites
from benchmarks.convergence import sweep as sweeping
from benchmarks.convergence.copies import SimulatedCopies
from benchmarks.convergence.methods import GRID, METHODS, Method
from benchmarks.convergence.ranks import SimulatedRanks
from benchmarks.convergence.sweep import Results, Sweep, make
from benchmarks.convergence.training import Run, Shape, train
from support.distributed import on_ranks
from support.marks import slow
from support.units import reduce, unit_reducer
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy

EXACT: Any = {"rtol": 0, "atol": 0}
CODECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quantized": ({"kind": "quantized", "bits": 4}, {"kind": "average"}),
    "packed": ({"kind": "packed", "density": 0.1, "warmup_steps": 2}, {"kind": "residual"}),
    "matrix": ({"kind": "matrix", "group": 8}, {"kind": "residual", "lead": 0.5}),
}


class Model(nn.Module):
    """Two units; rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(60, 37, bias=False)])
        self.top = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(64, 31)])})
        self.head = nn.Linear(40, 33)


def gradients(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.some(3)
@on_ranks(2, slow(3))
@pytest.mark.parametrize("name", CODECS)
def test_simulated_ranks_are_ranks(rank: int, world_size: int, name: str) -> None:
    codec, feedback = CODECS[name]
    rule = {"when": {"min_numel": 1}, "codec": codec, "feedback": feedback}
    policy = Policy.load({"schema": 1, "gradients": [rule]})
    model = Model()
    simulated = SimulatedRanks(model, policy, world_size)
    averaged = []
    for step in range(4):
        for r in range(world_size):
            gradients(model, r, step)
            simulated.take(r)
        simulated.average()
        averaged.append(whole(model))
    for unit in ("top.h.0", ""):
        params = tuple(
            UnitParam(
                name=n,
                shape=tuple(p.shape),
                columns=math.ceil(p.shape[0] / world_size) * math.prod(p.shape[1:]),
            )
            for n, p in model.named_parameters()
            if n.startswith("top") == bool(unit)
        )
        info = UnitInfo(name=unit, params=params, world_size=world_size, dtype=torch.float32)
        plan = build_plan([info], policy).units[0]
        reducer = unit_reducer(plan)
        for step in range(4):
            gradients(model, rank, step)
            mine = whole(model)
            rows = [split(mine[u.name], u, world_size) for u in params]
            out = reduce(reducer, torch.cat(rows, 1))
            start = 0
            for u in params:
                expected = split(averaged[step][u.name], u, world_size)[rank]
                # Dense sums may add in another order.
                dense = step < plan.warmup_steps or len(u.shape) < 2
                close: Any = {} if dense else EXACT
                torch.testing.assert_close(out[start : start + u.columns], expected, **close)
                start += u.columns


def split(t: Tensor, param: UnitParam, ranks: int) -> Tensor:
    """``[ranks, columns]`` as FSDP shards it, padding zero."""
    flat = torch.zeros(ranks * param.columns)
    flat[: t.numel()] = t.flatten()
    return flat.view(ranks, -1)


SHAPE = Shape(width=32, heads=1, layers=1, context=16, ranks=2, batch=2)
FAST = METHODS["top 5% in 4 bits, residual"]


def run_of(rate: float, seed: int = 0, steps: int = 4) -> Run:
    return Run(method=FAST, shape=SHAPE, steps=steps, rate=rate, seed=seed)


def swept(best: float, **given: Any) -> list[tuple[float, int]]:
    """Rates and seeds in the order of a sweep whose loss is least at ``best``."""
    made: list[Run] = []

    def loss(run: Run) -> float | None:
        distance = abs(math.log(run.rate / best))
        return (distance if distance < 2 else math.inf) if run in made else None

    sweep = Sweep(methods=[FAST], shape=SHAPE, steps=[4], seeds=2, **given)
    while run := next(sweep.next_runs(loss), None):
        assert run not in made
        made.append(run)
    return [(run.rate, run.seed) for run in made]


def test_a_sweep_goes_on_until_the_best_lies_between_others() -> None:
    start = [(rate, 0) for rate in FAST.rates]
    middle = FAST.rates[1]
    assert swept(middle) == [*start, (middle, 1)]
    lower = list(reversed([rate for rate in GRID if rate < FAST.rates[0]]))
    assert swept(lower[1]) == [*start, *((rate, 0) for rate in lower[:3]), (lower[1], 1)]
    assert swept(lower[1], max_rates=4) == [*start, (lower[0], 0), (lower[0], 1)]
    assert swept(GRID[-1], max_rates=len(GRID))[-2:] == [(GRID[-1], 0), (GRID[-1], 1)]


def test_the_first_rates_are_neighbours_in_the_grid() -> None:
    for method in METHODS.values():
        at = [GRID.index(rate) for rate in method.rates]
        assert len(at) >= 3
        assert at == list(range(at[0], at[0] + len(at)))


def test_a_run_says_what_it_sent() -> None:
    said = train(run_of(1e-3, steps=10))
    assert said["bits"] == said["bits_with_warmup"]
    # 5% of 4 bits, room for a sixteenth more, an index near its entropy, and blocks half empty.
    assert 0.05 * 4 + 0.28 < said["bits"] < 1
    assert list(said["losses"]) == [str(step) for step in range(1, 11)]
    assert said["loss"] == pytest.approx(said["losses"]["10"], abs=1e-5)
    assert train(run_of(1e-3, steps=10))["loss"] == said["loss"]
    assert train(run_of(2e-3, steps=10))["loss"] != said["loss"]
    dense = Method(name="dense", average=0.5)
    run = Run(method=dense, shape=SHAPE, steps=2, rate=1e-3, seed=0)
    assert train(run)["bits"] == 32


def test_a_run_that_diverges_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl", {"suite": "convergence"})
    assert results.loss(run_of(1.0)) is None
    results.add(run_of(1.0), {"loss": None})
    again = Results(tmp_path / "results.jsonl", {"suite": "convergence"})
    assert again.loss(run_of(1.0)) == math.inf
    # Those of another suite are not its.
    assert Results(tmp_path / "results.jsonl", {"suite": "paired"}).loss(run_of(1.0)) is None


@pytest.mark.slow
def test_two_jobs_make_the_same_runs(tmp_path: Path) -> None:
    losses = {}
    for jobs in (1, 2):
        results = Results(tmp_path / f"{jobs}.jsonl", {"suite": "convergence"})
        sweep = Sweep(methods=[FAST], shape=SHAPE, steps=[2], seeds=1, max_rates=3)
        make(sweep, results, jobs=jobs, device="cpu", show=lambda text: None)
        losses[jobs] = {r["run"]["rate"]: r["loss"] for r in results.records}
    assert losses[1] == losses[2]
    assert len(losses[1]) == 3


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "convergence.jsonl"
    command = ["convergence", "--methods", "dense; top 5% in 4 bits, residual", "--seeds", "2"]
    for name, value in {"width": 32, "layers": 1, "context": 16, "ranks": 2, "batch": 2}.items():
        command += [f"--{name}", str(value)]
    command += ["--max-rates", "3", "--steps", "2", "3"]
    command += ["--json", str(file), "--plots", str(tmp_path)]
    assert suites.main(command) == 0
    said = capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 2 * 2 * (3 + 1)
    assert said.count("| dense |") == 2
    for name in ("bits", "steps"):
        assert (tmp_path / f"convergence-{name}.png").read_bytes().startswith(b"\x89PNG")

    # Nothing is made twice, and the report needs nothing but the file.
    monkeypatch.setattr(sweeping, "train", None)
    assert suites.main(command) == 0
    assert capsys.readouterr().out == said
    assert suites.main(["report", str(file)]) == 0
    assert capsys.readouterr().out.strip() in said

    # A family without a first momentum has nothing to repeat.
    monkeypatch.undo()
    averaged = [*command, "--methods", "dense; dense, averaged", "--momentum", "0.9", "0.5"]
    assert suites.main([*averaged, "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("| dense, momentum 0.5 |") == said.count("| dense, averaged |") == 1
    records = [json.loads(line) for line in file.read_text().splitlines()]
    betas = {r["method"]: r["run"]["betas"] for r in records}
    assert betas["dense, momentum 0.5"] == [0.5, 0.95]
    assert betas["dense, averaged"] == [0.0, 0.95]
    assert betas["dense"] == [0.9, 0.95]

    for wrong in (["--methods", "dense; no such"], ["--momentum", "1"], ["--width", "48"]):
        assert suites.main(["convergence", *wrong]) == 2
        assert wrong[-1].removeprefix("dense; ") in capsys.readouterr().err


@pytest.mark.parametrize("bits", [2, 4])
def test_copies_are_what_the_model_computes_with(bits: int) -> None:
    """Exact at first; then they follow, within the blocks, and the optimizer's weights stay."""
    rule = {"when": {"min_numel": 1}, "codec": {"kind": "delta", "bits": bits}}
    dense = {"when": {}, "codec": {"kind": "dense"}}
    policy = Policy.load({"schema": 1, "gradients": [dense], "parameters": [rule]})
    model = Model()
    copies = SimulatedCopies(model, policy, 4, torch.float32)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def distance() -> float:
        with copies.in_place():
            off = [(p - weights[n]).norm() for n, p in model.named_parameters() if p.ndim > 1]
        for name, p in model.named_parameters():
            assert torch.equal(p, weights[name])
        return float(torch.stack(off).norm())

    assert distance() == 0
    change = {n: 0.1 * torch.randn_like(w) for n, w in weights.items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            weights[name] += change[name]
            p.copy_(weights[name])
    whole = float(torch.stack([c.norm() for c in change.values() if c.ndim > 1]).norm())
    assert distance() == pytest.approx(whole)  # nobody has been told yet
    gaps = []
    for _ in range(6):
        copies.note_step()
        gaps.append(distance())
        assert distance() == gaps[-1]
    # Of a Gaussian a bit keeps 1 - 2 / pi, 4 bits in blocks of 256 less than a hundredth.
    assert gaps[0] < (0.65 if bits == 1 else 0.15) * whole
    assert all(b < a for a, b in itertools.pairwise(gaps))
