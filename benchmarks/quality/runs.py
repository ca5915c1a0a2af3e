"""Which runs each comparison needs, and the ranks that make them.

A comparison yields the runs that can start now, given the losses so far. All ranks see the same
losses, so they choose the same next run; rank 0 writes the records. An interrupted comparison goes
on where it stopped.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
import torch.multiprocessing as mp

from ..gloo import join
from ..records import Record, append, read
from .intervals import difference
from .methods import GRID, LINES, METHODS, Method
from .settings import Run, Setting, Shape
from .training import train

Losses = Callable[[Run], float | None]
"""The loss of a finished run: infinite if it diverged, None if it has not been made."""


class Comparison(Protocol):
    """What :func:`make` makes the runs of."""

    def next_runs(self, losses: Losses) -> Iterator[Run]:
        """The runs that can start now, the most useful first."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every method at its own best rate.

    Attributes:
        steps: lengths of training, each with its own sweep.
        seeds: the first one sweeps the rates, the others train at the best.
        max_rates: end a sweep after this many rates, wherever the best is.
    """

    methods: Sequence[Method]
    shape: Shape
    steps: Sequence[int]
    seeds: int
    max_rates: int = 6

    def next_runs(self, losses: Losses) -> Iterator[Run]:
        for steps in self.steps:
            later: list[Run] = []
            for method in self.methods:

                def run(
                    rate: float, seed: int = 0, method: Method = method, steps: int = steps
                ) -> Run:
                    return Run(method=method, shape=self.shape, steps=steps, rate=rate, seed=seed)

                missing, best = sweep(run, method.rates, self.max_rates, losses)
                yield from missing
                if best is not None:
                    later += [run(best, seed) for seed in range(1, self.seeds)]
            yield from (run for run in later if losses(run) is None)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Lines beside dense, seed by seed, at dense's best rate.

    Attributes:
        lines: names in ``LINES``.
        kept: whether tagc keeps the optimizer's rates.
        seeds: the fewest and the most pairs of a line.
        within: seeds are added while half of an interval is wider than this, relative to the loss.
    """

    settings: Sequence[Setting]
    lines: Sequence[str]
    kept: bool
    seeds: tuple[int, int] = (3, 8)
    within: float = 0.003

    def next_runs(self, losses: Losses) -> Iterator[Run]:
        for setting in self.settings:
            missing, rate = dense_rate(setting, losses)
            yield from missing
            if rate is None:
                continue
            for seed in range(self.seeds[1]):
                runs = [
                    self.run(setting, line, rate, seed)
                    for line in self.lines
                    if seed < self.seeds[0] or self._is_wide(setting, line, rate, losses)
                ]
                if runs:
                    runs.insert(0, setting.run(setting.dense, rate, seed, kept=False))
                yield from (run for run in runs if losses(run) is None)

    def run(self, setting: Setting, line: str, rate: float, seed: int) -> Run:
        """A line's run at dense's rate."""
        method = METHODS[LINES[line]]
        return setting.run(method, rate, seed, kept=self.kept and method.policy is not None)

    def _is_wide(self, setting: Setting, line: str, rate: float, losses: Losses) -> bool:
        seeds = range(self.seeds[1])
        mine = {s: losses(self.run(setting, line, rate, s)) for s in seeds}
        dense = {s: losses(setting.run(setting.dense, rate, s, kept=False)) for s in seeds}
        interval = difference(_known(mine), _known(dense))
        return interval is None or interval.half > self.within


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Runs that depend on no other."""

    runs: Sequence[Run]

    def next_runs(self, losses: Losses) -> Iterator[Run]:
        yield from (run for run in self.runs if losses(run) is None)


def dense_rate(setting: Setting, losses: Losses) -> tuple[list[Run], float | None]:
    """Runs that dense's sweep on the first seed still needs; when it needs none, the best rate."""

    def run(rate: float) -> Run:
        return setting.run(setting.dense, rate * setting.unit, 0, kept=False)

    missing, best = sweep(run, setting.rates, setting.max_rates, losses)
    return missing, None if best is None else best * setting.unit


def sweep(
    run: Callable[[float], Run], start: Sequence[float], most: int, losses: Losses
) -> tuple[list[Run], float | None]:
    """Try rates until the best one lies between two others.

    Args:
        start: the first rates, neighbours in ``GRID``.
        most: end after this many.

    Returns:
        The runs that are still needed; when none is, the best rate.
    """
    rates = list(start)
    while True:
        found = {rate: losses(run(rate)) for rate in rates}
        if missing := [run(rate) for rate, loss in found.items() if loss is None]:
            return missing, None
        best = min(rates, key=lambda rate: found[rate] or 0.0)
        first, last = GRID.index(rates[0]), GRID.index(rates[-1])
        if len(rates) < most and best == rates[0] and first > 0:
            rates.insert(0, GRID[first - 1])
        elif len(rates) < most and best == rates[-1] and last + 1 < len(GRID):
            rates.append(GRID[last + 1])
        else:
            return [], best


def _known(losses: dict[int, float | None]) -> dict[int, float]:
    return {seed: loss for seed, loss in losses.items() if loss is not None}


class Results:
    """The runs of one comparison in a file."""

    def __init__(self, file: Path, facts: Record) -> None:
        self._file, self._facts = file, facts
        found = read([file]) if file.exists() else []
        about = {key: facts[key] for key in ("suite", "comparison")}
        self.records = [r for r in found if about.items() <= r.items()]
        self._losses: dict[str, float] = {}
        for record in self.records:
            self._losses.setdefault(*self._loss_of(record))

    def loss(self, run: Run) -> float | None:
        """See ``Losses``."""
        return self._losses.get(_text(run.key))

    def add(self, run: Run, said: Record, *, write: bool = True) -> None:
        """Take in a record; on the rank that writes, append it to the file."""
        record = self._facts | {"method": run.method.name, "run": run.key} | said
        self.records.append(record)
        self._losses.setdefault(*self._loss_of(record))
        if write:
            append(self._file, record)

    @staticmethod
    def _loss_of(record: Record) -> tuple[str, float]:
        return _text(record["run"]), math.inf if record["loss"] is None else record["loss"]


def _text(key: Record) -> str:
    return json.dumps(key, sort_keys=True)


def make(comparison: Comparison, file: Path, facts: Record) -> None:
    """Make all runs that are missing, each on its own number of ranks."""
    while run := next(comparison.next_runs(Results(file, facts).loss), None):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run.shape.ranks
            mp.spawn(_rank, args=(ranks, folder, comparison, file, facts), nprocs=ranks)


def _rank(
    rank: int, ranks: int, folder: str, comparison: Comparison, file: Path, facts: Record
) -> None:
    """Make runs as long as the next one wants this many ranks."""
    join(rank, ranks, folder, minutes=30)
    results = Results(file, facts)
    dist.barrier()  # all have read the file before anyone writes
    while run := next(comparison.next_runs(results.loss), None):
        if run.shape.ranks != ranks:
            break
        said = [train(run)]
        dist.broadcast_object_list(said)  # so that all ranks choose by the same loss
        results.add(run, said[0], write=rank == 0)
        if rank == 0:
            loss = "diverged" if said[0]["loss"] is None else f"{said[0]['loss']:.4f}"
            print(
                f"{run.method.name}: {run.steps} steps, rate {run.rate:g}, seed {run.seed}: "
                f"{loss}, {said[0]['bits']:.2f} bits, {said[0]['step_ms']:.0f} ms a step",
                file=sys.stderr,
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()
