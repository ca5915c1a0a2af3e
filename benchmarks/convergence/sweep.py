"""Which runs to make: rates of every method until the best is between others; then more seeds."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..records import Record, append, read
from .methods import GRID, Method
from .training import Run, Shape, train


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is asked for.

    Attributes:
        steps: lengths of training, each with a sweep of its own.
        seeds: the first sweeps the rates, the others train at the best.
        max_rates: end a sweep that has tried so many, wherever the best is.
    """

    methods: Sequence[Method]
    shape: Shape
    steps: Sequence[int]
    seeds: int
    max_rates: int = 6

    def next_runs(self, losses: Callable[[Run], float | None]) -> Iterator[Run]:
        """The runs that can start now, the most useful first.

        Args:
            losses: of a finished run; infinite if it diverged, None if it has not been made.
        """
        for steps in self.steps:
            later: list[Run] = []
            for method in self.methods:
                wanted, best = self._rates(method, steps, losses)
                yield from wanted
                if best is not None:
                    later += [self._run(method, steps, best, s) for s in range(1, self.seeds)]
            yield from (run for run in later if losses(run) is None)

    def _rates(
        self, method: Method, steps: int, losses: Callable[[Run], float | None]
    ) -> tuple[list[Run], float | None]:
        """Runs that the sweep still needs, and when it needs none, the best rate."""
        rates = list(method.rates)
        while True:
            runs = [self._run(method, steps, rate, 0) for rate in rates]
            missing = [run for run in runs if losses(run) is None]
            if missing:
                return missing, None
            found = [losses(run) for run in runs]
            best = min(zip(found, rates, strict=True))[1]
            first, last = GRID.index(rates[0]), GRID.index(rates[-1])
            if len(rates) >= self.max_rates:
                return [], best
            if best == rates[0] and first > 0:
                rates.insert(0, GRID[first - 1])
            elif best == rates[-1] and last + 1 < len(GRID):
                rates.append(GRID[last + 1])
            else:
                return [], best

    def _run(self, method: Method, steps: int, rate: float, seed: int) -> Run:
        return Run(method=method, shape=self.shape, steps=steps, rate=rate, seed=seed)


class Wanted(Protocol):
    """What :func:`make` makes the runs of."""

    def next_runs(self, losses: Callable[[Run], float | None]) -> Iterator[Run]:
        """See :meth:`Sweep.next_runs`."""
        ...


def losses_of(records: Sequence[Record]) -> Callable[[Run], float | None]:
    """The loss of a run that is in the records; infinite if it diverged, None if it is not."""
    found = {
        json.dumps(r["run"], sort_keys=True): math.inf if r["loss"] is None else r["loss"]
        for r in reversed(records)
    }
    return lambda run: found.get(json.dumps(run.key, sort_keys=True))


class Results:
    """The runs in a file, which an interrupted sweep leaves and the next one goes on with."""

    def __init__(self, file: Path, facts: Record) -> None:
        self._file, self._facts = file, facts
        found = read([file]) if file.exists() else []
        self.records = [r for r in found if r.get("suite") == facts["suite"]]

    def loss(self, run: Run) -> float | None:
        """See :meth:`Sweep.next_runs`."""
        return losses_of(self.records)(run)

    def add(self, run: Run, said: Record) -> None:
        """Write one down."""
        about = {"method": run.method.name, "family": run.method.family, "run": run.key}
        self.records.append(self._facts | about | said)
        append(self._file, self.records[-1])


def make(
    sweep: Wanted, results: Results, *, jobs: int, device: str, show: Callable[[str], None]
) -> None:
    """Make all runs that are missing, ``jobs`` at a time, each in one thread."""
    if jobs == 1:
        while run := next(sweep.next_runs(results.loss), None):
            _add(run, train(run, device), results, show)
        return
    # CUDA cannot be used in a forked process.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Record], Run] = {}
        while True:
            active = list(running.values())
            for run in sweep.next_runs(results.loss):
                if len(running) == jobs:
                    break
                if run not in active:
                    running[pool.submit(train, run, device)] = run
                    active.append(run)
            if not running:
                return
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                _add(running.pop(future), future.result(), results, show)


def _add(run: Run, said: Record, results: Results, show: Callable[[str], None]) -> None:
    results.add(run, said)
    loss = "diverged" if said["loss"] is None else f"{said['loss']:.4f}"
    show(
        f"{run.method.name}: {run.steps} steps, rate {run.rate:g}, seed {run.seed}: {loss}, "
        f"{said['bits']:.2f} bits, {said['step_ms']:.0f} ms a step"
    )
