"""Which runs to make: dense's rates in a setting, then the lines at dense's best, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..convergence.methods import GRID, METHODS, Method
from ..convergence.training import Run
from .intervals import difference
from .settings import Setting

Losses = Callable[[Run], float | None]
DENSE = METHODS["dense"]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A method, and whether tagc keeps the optimizer's rates and the limit (``keep_rates``)."""

    name: str
    method: Method
    kept: bool


def _lines() -> Iterator[Line]:
    named = {
        "4 bits": "4 bits, residual, bfloat16 residual",
        "2 bits": "matrix, 2 bits",
        "1 bit": "matrix, 1 bit",
        "1 of 8": "matrix, 1 of 8",
    }
    for name, method in named.items():
        yield Line(name=name, method=METHODS[method], kept=True)
        yield Line(name=f"{name}, rates not kept", method=METHODS[method], kept=False)
    named["1 of 32"] = "matrix, 1 of 32"
    for name in ("2 bits", "1 bit", "1 of 8", "1 of 32"):
        measured = METHODS[f"{named[name]}, measured lead"]
        yield Line(name=f"{name}, measured lead", method=measured, kept=True)
    hosts, thrifty = "4 bits, residual, bfloat16 residual", "matrix, 1 bit, bfloat16 residual"
    others = {
        "changes in 8 bits": "dense, changes in 8 bits",
        "changes in 4 bits": "dense, changes in 4 bits",
        "changes in 2 bits": "dense, changes in 2 bits",
        "changes in 1 bit": "dense, changes in 1 bit",
        "changes in 4 bits, bf16 copy": "dense, changes of a bfloat16 copy in 4 bits",
        "changes in 4 bits, bf16 copy, stochastic": (
            "dense, changes of a bfloat16 copy in 4 bits, stochastic"
        ),
        "changes in 4 bits, stochastic": "dense, changes in 4 bits, stochastic",
        "4 bits, changes in 4 bits": f"{hosts}, changes in 4 bits",
        "4 bits, changes in 4 bits, stochastic": f"{hosts}, changes in 4 bits, stochastic",
        "1 bit, changes in 2 bits": f"{thrifty}, changes in 2 bits",
        "1 of 8, changes in 2 bits": "matrix, 1 of 8, bfloat16 residual, changes in 2 bits",
        "1 of 8, measured lead, changes in 2 bits": (
            "matrix, 1 of 8, measured lead, bfloat16 residual, changes in 2 bits"
        ),
        "4 bits, int8 residual": "4 bits, residual, int8 residual",
        "8 bits, stateless": "8 bits, none, stochastic",
        "4 bits, stateless": "4 bits, none, stochastic",
        "4 bits in blocks of 32, stateless": "4 bits in blocks of 32, none, stochastic",
        "4 bits, stateless, to nearest": "4 bits, none, nearest",
    }
    for name, method in others.items():
        yield Line(name=name, method=METHODS[method], kept=True)


LINES = {line.name: line for line in _lines()}


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What is asked for.

    Attributes:
        seeds: the fewest and the most pairs of a line.
        within: half of an interval that is small enough, relative to the loss.
    """

    settings: Sequence[Setting]
    lines: Sequence[Line]
    seeds: tuple[int, int]
    within: float

    def next_runs(self, losses: Losses) -> Iterator[Run]:
        """The runs that can start now, the most useful first; see
        :meth:`benchmarks.convergence.sweep.Sweep.next_runs`."""
        for setting in self.settings:
            missing, rate = dense_rate(setting, losses)
            yield from missing
            if rate is None:
                continue
            for seed in range(self.seeds[1]):
                runs = [dense_run(setting, rate, seed)]
                runs += [
                    line_run(setting, line, rate, seed)
                    for line in self.lines
                    if seed < self.seeds[0] or self._is_wide(setting, line, rate, losses)
                ]
                if len(runs) > 1:
                    yield from (run for run in runs if losses(run) is None)

    def _is_wide(self, setting: Setting, line: Line, rate: float, losses: Losses) -> bool:
        mine, dense = {}, {}
        for seed in range(self.seeds[1]):
            for found, run in (
                (mine, line_run(setting, line, rate, seed)),
                (dense, dense_run(setting, rate, seed)),
            ):
                if (loss := losses(run)) is not None:
                    found[seed] = loss
        interval = difference(mine, dense)
        return interval is None or interval.half > self.within


def dense_rate(setting: Setting, losses: Losses) -> tuple[list[Run], float | None]:
    """Runs that dense's sweep on the first seed still needs, and when it needs none, the best."""
    rates = list(setting.rates)
    while True:
        runs = [dense_run(setting, rate * setting.unit, 0) for rate in rates]
        missing = [run for run in runs if losses(run) is None]
        if missing:
            return missing, None
        best = min(zip((losses(run) or 0.0 for run in runs), rates, strict=True))[1]
        first, last = GRID.index(rates[0]), GRID.index(rates[-1])
        if len(rates) < setting.max_rates and best == rates[0] and first > 0:
            rates.insert(0, GRID[first - 1])
        elif len(rates) < setting.max_rates and best == rates[-1] and last + 1 < len(GRID):
            rates.append(GRID[last + 1])
        else:
            return [], best * setting.unit


def dense_run(setting: Setting, rate: float, seed: int) -> Run:
    """What a line is compared with."""
    return Run(
        method=DENSE,
        shape=setting.shape,
        steps=setting.steps,
        rate=rate,
        seed=seed,
        recipe=setting.recipe,
    )


def line_run(setting: Setting, line: Line, rate: float, seed: int) -> Run:
    """A line's run at dense's rate."""
    recipe = replace(setting.recipe, kept=line.kept)
    return replace(dense_run(setting, rate, seed), method=line.method, recipe=recipe)
