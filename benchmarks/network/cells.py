"""The run: which cells there are, which are missing, and measuring them one by one.

A cell is a line of JSON with a key (what was measured), the machine's facts and the numbers. It is
written as soon as it is there, and one whose key the file already has is not measured again: an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.network.methods import Method
from benchmarks.network.namespaces import Network, Rate
from benchmarks.network.ranks import Ranks
from benchmarks.network.training import Settings

UNLIMITED = Rate(None)
# After a change of rate, TCP and tc need a step to forget the old one.
_WARM_UP = 1
_LEAST_STEPS = 3
_VALIDATIONS, _WINDOWS = 4, 32

Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        ranks: world sizes.
        ranks_per_host: so many share a host and its link; tagc and the forms by messages then
            work in two levels.
        rates: links; the unlimited one is measured first in any case.
        methods: in the order of measurement, which every second pass reverses.
        settings: of the training.
        steps: timed steps of a cell at most, and 3 at least.
        cell_seconds: what the timed steps of a cell should take at most.
        loss_ranks: world sizes at which the loss is measured.
        passes: how often to measure every step time.
        budget: seconds after which no further cell is begun.
    """

    ranks: tuple[int, ...]
    rates: tuple[Rate, ...]
    methods: tuple[Method, ...]
    settings: Settings
    ranks_per_host: int = 1
    steps: int = 8
    cell_seconds: float = 15.0
    loss_ranks: tuple[int, ...] = ()
    passes: int = 1
    budget: float = 3000.0


class OutOfBudget(Exception):  # noqa: N818 - no error: what is there is kept
    """The next cell does not fit in the budget."""


@dataclass
class ResultsFile:
    """The lines of one file.

    Attributes:
        facts: what every line that is added says about machine, versions and command.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cells = {_hashable(cell["key"]): cell for cell in read_cells(self.path)}

    def get(self, key: dict[str, Any]) -> Cell | None:
        """The cell of a key, None if it is not there yet."""
        return self._cells.get(_hashable(key))

    def add(self, key: dict[str, Any], numbers: dict[str, Any]) -> Cell:
        """Append a cell."""
        cell = {"key": key, **self.facts, "load": os.getloadavg()[0], **numbers}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        self._cells[_hashable(key)] = cell
        return cell


def read_cells(path: Path) -> list[Cell]:
    """The cells of a file, the last one of each key; none if there is no file.

    Raises:
        ValueError: if a line is not a cell.
    """
    if not path.exists():
        return []
    cells: dict[str, Cell] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            cell = json.loads(line)
            cells[_hashable(cell["key"])] = cell
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}:{number} is no result of this benchmark") from None
    return list(cells.values())


def measure(options: Options, results: ResultsFile, say: Callable[[str], None] = print) -> None:
    """Measure every cell that the file does not have.

    Raises:
        OutOfBudget: if cells are left when the budget is spent.
        NetworkUnavailable: if this machine cannot make the network.
        RanksError: if a rank fails; the cells measured before are in the file.
    """
    run = _Run(options, results, say, deadline=time.monotonic() + options.budget)
    for ranks in options.ranks:
        if any(results.get(key) is None for key in _keys(options, ranks)):
            run.measure_ranks(ranks)


def _keys(options: Options, ranks: int) -> Iterator[dict[str, Any]]:
    if ranks in options.loss_ranks:
        yield from (_key("loss", options, ranks, method=method) for method in options.methods)
    for turn in range(options.passes):
        for rate in options.rates:
            where = _where(rate, turn)
            yield _key("link", options, ranks, **where)
            yield from (_key("step", options, ranks, method=m, **where) for m in options.methods)


def _key(
    kind: str, options: Options, ranks: int, method: Method | None = None, **where: Any
) -> dict[str, Any]:
    key: dict[str, Any] = {"kind": kind, "ranks": ranks, **where}
    key["settings"] = options.settings.key
    if options.ranks_per_host > 1:
        key["ranks_per_host"] = options.ranks_per_host
    if method is not None:
        key |= {"method": method.name, "definition": method.definition}
    return key


def _where(rate: Rate, turn: int) -> dict[str, Any]:
    return {"rate": str(rate), "pass": turn}


@dataclass
class _Run:
    options: Options
    results: ResultsFile
    say: Callable[[str], None]
    deadline: float

    def measure_ranks(self, ranks: int) -> None:
        options = self.options
        with (
            Network(ranks, options.ranks_per_host) as network,
            Ranks(network, options.settings) as workers,
        ):
            ready = workers.ask("ready")[0]
            self.results.facts |= ready
            if ranks in options.loss_ranks:
                for method in options.methods:
                    self._loss(workers, ranks, method)
            for method in options.methods:
                self._settle(workers, ranks, method)
            for turn in range(options.passes):
                order = options.methods[::-1] if turn % 2 else options.methods
                for rate in options.rates:
                    self._link(network, workers, ranks, rate, turn)
                    for method in order:
                        self._steps(network, workers, ranks, rate, turn, method)

    def _loss(self, workers: Ranks, ranks: int, method: Method) -> None:
        key = _key("loss", self.options, ranks, method=method)
        if self.results.get(key):
            return
        self._check_budget(0)
        answers = workers.ask(
            "loss",
            method=method.name,
            steps=self.options.settings.loss_steps,
            validations=_VALIDATIONS,
            windows=_WINDOWS,
        )
        numbers = {
            "about": method.about,
            "losses": _over_ranks(answers, "losses", statistics.fmean),
            "kernel_bytes": _over_ranks(answers, "kernel_bytes", statistics.fmean),
            "validation": answers[0]["validation"],
        }
        self.results.add(key, numbers)
        last = list(numbers["validation"].values())[-1]
        self.say(f"{ranks} ranks  {method.name:16}  validation loss {last:.4f}")

    def _settle(self, workers: Ranks, ranks: int, method: Method) -> None:
        # Before the first limit: it is not measured, so it need not wait for a slow link.
        keys = _keys(self.options, ranks)
        mine = (k for k in keys if k["kind"] == "step" and k["method"] == method.name)
        if any(self.results.get(key) is None for key in mine):
            self._check_budget(0)
            workers.ask("settle", method=method.name)

    def _link(self, network: Network, workers: Ranks, ranks: int, rate: Rate, turn: int) -> None:
        key = _key("link", self.options, ranks, **_where(rate, turn))
        if self.results.get(key):
            return
        self._check_budget(0)
        network.limit(rate)
        # As large as a block's: gloo's all-gather fares differently with other sizes.
        block = 4 * 12 * self.options.settings.width**2
        answers = workers.ask("link", payload=block * (ranks - 1) // ranks)
        # A collective is as slow as its slowest rank.
        numbers = {
            name: (min if name.endswith("rate") else max)(a[name] for a in answers)
            for name in answers[0]
        }
        self.results.add(key, numbers)
        self.say(
            f"{ranks} ranks  {rate.label}: all-to-all {numbers['all_to_all_rate'] / 1e6:.0f} "
            f"Mbit/s, all-gather {numbers['all_gather_rate'] / 1e6:.0f}, "
            f"receives first {numbers['exchange_rate'] / 1e6:.0f}"
        )

    def _steps(
        self,
        network: Network,
        workers: Ranks,
        ranks: int,
        rate: Rate,
        turn: int,
        method: Method,
    ) -> None:
        options = self.options
        key = _key("step", options, ranks, method=method, **_where(rate, turn))
        if self.results.get(key):
            return
        expected = self._expected_seconds(ranks, rate, method)
        steps = max(_LEAST_STEPS, min(options.steps, int(options.cell_seconds / expected)))
        self._check_budget(expected * (_WARM_UP + steps))
        network.limit(rate)
        if method.measures_link:
            workers.ask("begin", method=method.name)
            network.limit(UNLIMITED)
            workers.ask("settle", method=method.name)
            network.limit(rate)
        before = network.shaped_bytes()
        answers = workers.ask("time", method=method.name, warm_up=_WARM_UP, steps=steps)
        after = network.shaped_bytes()
        numbers = combine(answers) | {
            "about": method.about,
            "published": method.published,
            "parameters": answers[0]["parameters"],
            "shaped_bytes": (
                None
                if before is None or after is None
                else (sum(after) - sum(before)) / network.hosts / (_WARM_UP + steps)
            ),
        }
        self.results.add(key, numbers)
        self.say(
            f"{ranks} ranks  {rate.label:10}  {method.name:16}  "
            f"{statistics.median(numbers['step_seconds']):.3f} s a step, "
            f"{numbers['kernel_bytes'] / 1e6:.2f} MB a host"
        )

    def _expected_seconds(self, ranks: int, rate: Rate, method: Method) -> float:
        key = _key("step", self.options, ranks, method=method, **_where(UNLIMITED, 0))
        unlimited = self.results.get(key)
        if unlimited is None:
            return 1.0
        seconds = statistics.median(unlimited["step_seconds"])
        if rate.bits_per_second is None:
            return seconds
        return seconds + 8 * unlimited["kernel_bytes"] / rate.bits_per_second

    def _check_budget(self, seconds: float) -> None:
        if time.monotonic() + seconds > self.deadline:
            raise OutOfBudget


def combine(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a cell from the answers of its ranks: of a step's seconds the slowest
    rank's, of the rest the mean."""
    steps, waited = (
        [a[name] for a in answers] for name in ("step_seconds", "communication_seconds")
    )
    compute = [
        statistics.fmean(s[i] - w[i] for s, w in zip(steps, waited, strict=True))
        for i in range(len(steps[0]))
    ]
    return {
        "step_seconds": [max(times) for times in zip(*steps, strict=True)],
        "communication_seconds": [statistics.fmean(times) for times in zip(*waited, strict=True)],
        "compute_seconds": statistics.median(compute),
        "kernel_bytes": statistics.fmean(a["kernel_bytes"] for a in answers),
        "kernel_bytes_max": max(a["kernel_bytes"] for a in answers),
        "tagc_bytes": _mean_bytes(a["tagc_bytes"] for a in answers),
        "payload_bytes": answers[0]["payload_bytes"],
        "collectives": answers[0]["collectives"],
        "compressed_elements": answers[0]["compressed_elements"],
    }


def _mean_bytes(counted: Iterable[list[float] | None]) -> dict[str, float] | None:
    pairs = [pair for pair in counted if pair is not None]
    if not pairs:
        return None
    gradients, parameters = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    return {"gradients": gradients, "parameters": parameters}


def _over_ranks(
    answers: list[dict[str, Any]], name: str, reduce: Callable[[list[float]], float]
) -> list[float]:
    return [reduce(list(values)) for values in zip(*(a[name] for a in answers), strict=True)]


def _hashable(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
