"""The run: which cells there are, which are missing, and measuring them one by one.

A cell is a line of JSON with a key (what was measured), the machine's facts and the numbers. It is
written as soon as it is measured, and one whose key the file already has is not measured again: an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..records import append, read
from .methods import Method
from .namespaces import Network, Rate
from .ranks import Ranks
from .training import Settings

UNLIMITED = Rate(None)
# After a change of rate, TCP and tc need a step to forget the old one.
_WARM_UP = 1
_LEAST_STEPS = 3
# The timed steps of a cell should take no longer than this.
_CELL_SECONDS = 15.0
# In which each site exchanges once, and as often trains without.
_PERIODS = 4

Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        ranks: world sizes.
        ranks_per_host: ranks that share a host and its link.
        rates: links; the unlimited one is measured first in any case, but not for sites.
        latency: seconds of a packet between hosts.
        methods: in the order of measurement.
        settings: of the training.
        steps: timed steps of a cell at most, and 3 at least.
        step_time: seconds in which a device elsewhere computes a step of a site; None computes it
            here.
    """

    ranks: tuple[int, ...]
    rates: tuple[Rate, ...]
    methods: tuple[Method, ...]
    settings: Settings
    ranks_per_host: int = 1
    latency: float = 0.0
    steps: int = 8
    step_time: float | None = None


@dataclass
class ResultsFile:
    """The cells of one file.

    Attributes:
        facts: what every new cell says about machine, versions and command.
    """

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = read([self.path]) if self.path.exists() else []
        self._cells = {_hashable(cell["key"]): cell for cell in found if "key" in cell}

    @property
    def cells(self) -> list[Cell]:
        """All of them, the last one of each key."""
        return list(self._cells.values())

    def get(self, key: dict[str, Any]) -> Cell | None:
        """The cell of a key, None if it is not there yet."""
        return self._cells.get(_hashable(key))

    def add(self, key: dict[str, Any], numbers: dict[str, Any]) -> Cell:
        """Append a cell."""
        cell = {"key": key, **self.facts, "load": os.getloadavg()[0], **numbers}
        append(self.path, cell)
        self._cells[_hashable(key)] = cell
        return cell


def measure(options: Options, results: ResultsFile, say: Callable[[str], None] = print) -> None:
    """Measure every cell that the file does not have.

    Raises:
        NetworkUnavailable: if this machine cannot make the network.
        RanksError: if a rank fails; the cells measured before are in the file.
    """
    for ranks in options.ranks:
        if any(results.get(key) is None for key in _keys(options, ranks)):
            _Run(options, results, say, ranks).measure()


def _keys(options: Options, ranks: int) -> Iterator[dict[str, Any]]:
    for rate in options.rates:
        yield _key("link", options, ranks, rate)
        for method in options.methods:
            if not method.apart:
                yield _key("step", options, ranks, rate, method)
            elif rate != UNLIMITED:
                yield _key("sites", options, ranks, rate, method)


def _key(
    kind: str, options: Options, ranks: int, rate: Rate, method: Method | None = None
) -> dict[str, Any]:
    key: dict[str, Any] = {"kind": kind, "ranks": ranks, "rate": str(rate)}
    key["settings"] = asdict(options.settings)
    if options.ranks_per_host > 1:
        key["ranks_per_host"] = options.ranks_per_host
    if options.latency:
        key["latency"] = options.latency
    if kind == "sites" and options.step_time is not None:
        key["step_time"] = options.step_time
    if method is not None:
        key |= {"method": method.name, "definition": method.definition}
    return key


@dataclass
class _Run:
    options: Options
    results: ResultsFile
    say: Callable[[str], None]
    ranks: int

    def measure(self) -> None:
        options = self.options
        with (
            Network(self.ranks, options.ranks_per_host, options.latency) as network,
            Ranks(network, options.settings) as workers,
        ):
            self.results.facts |= workers.ask("ready")[0]
            for method in options.methods:
                self._settle(workers, method)
            for rate in options.rates:
                self._link(network, workers, rate)
                for method in options.methods:
                    if not method.apart:
                        self._steps(network, workers, rate, method)
                    elif rate != UNLIMITED:
                        self._sites(network, workers, rate, method)

    def _settle(self, workers: Ranks, method: Method) -> None:
        # Before the first limit: it is not measured, so it need not wait for a slow link.
        mine = (k for k in _keys(self.options, self.ranks) if k.get("method") == method.name)
        if any(self.results.get(key) is None for key in mine):
            workers.ask("settle", method=method.name)

    def _link(self, network: Network, workers: Ranks, rate: Rate) -> None:
        key = _key("link", self.options, self.ranks, rate)
        if self.results.get(key):
            return
        network.limit(rate)
        # As large as a block's: gloo's all-gather fares differently with other sizes.
        block = 4 * 12 * self.options.settings.width**2
        answers = workers.ask("link", payload=block * (self.ranks - 1) // self.ranks)
        # A collective is as slow as its slowest rank.
        numbers = {
            name: (min if name.endswith("rate") else max)(a[name] for a in answers)
            for name in answers[0]
        }
        self.results.add(key, numbers)
        self.say(
            f"{self.ranks} ranks  {rate.label}: messages {numbers['exchange_rate'] / 1e6:.0f} "
            f"Mbit/s, gloo's all-gather {numbers['all_gather_rate'] / 1e6:.0f}"
        )

    def _steps(self, network: Network, workers: Ranks, rate: Rate, method: Method) -> None:
        key = _key("step", self.options, self.ranks, rate, method)
        if self.results.get(key):
            return
        most = int(_CELL_SECONDS / self._expected_seconds(rate, method))
        steps = max(_LEAST_STEPS, min(self.options.steps, most))
        network.limit(rate)
        if method.measures_link:
            workers.ask("begin", method=method.name)
            network.limit(UNLIMITED)
            workers.ask("settle", method=method.name)
            network.limit(rate)
        answers = workers.ask("time", method=method.name, warm_up=_WARM_UP, steps=steps)
        numbers = combine(answers)
        numbers |= {"about": method.about, "parameters": answers[0]["parameters"]}
        self.results.add(key, numbers)
        self.say(
            f"{self.ranks} ranks  {rate.label:10}  {method.name:16}  "
            f"{statistics.median(numbers['step_seconds']):.3f} s a step, "
            f"{numbers['kernel_bytes'] / 1e6:.2f} MB a host"
        )

    def _sites(self, network: Network, workers: Ranks, rate: Rate, method: Method) -> None:
        key = _key("sites", self.options, self.ranks, rate, method)
        if self.results.get(key):
            return
        network.limit(rate)
        settings = {"periods": _PERIODS, "step_time": self.options.step_time}
        numbers = combine_sites(workers.ask("beside", method=method.name, **settings))
        self.results.add(key, {**numbers, "about": method.about})
        ratio = statistics.median(b / a for a, b in numbers["period_seconds"])
        self.say(
            f"{self.ranks} sites  {rate.label:10}  {method.name:16}  {ratio:.1%} of the steps "
            f"without exchange, {numbers['kernel_bytes'] / 1e6:.4f} MB a step"
        )

    def _expected_seconds(self, rate: Rate, method: Method) -> float:
        unlimited = self.results.get(_key("step", self.options, self.ranks, UNLIMITED, method))
        if unlimited is None:
            return 1.0
        seconds = statistics.median(unlimited["step_seconds"])
        if rate.bits_per_second is None:
            return seconds
        return seconds + 8 * unlimited["kernel_bytes"] / rate.bits_per_second


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
    counted = [a["tagc_bytes"] for a in answers if a["tagc_bytes"] is not None]
    gradients, parameters = (
        [statistics.fmean(values) for values in zip(*counted, strict=True)] if counted else (0, 0)
    )
    return {
        "step_seconds": [max(times) for times in zip(*steps, strict=True)],
        "communication_seconds": [statistics.fmean(times) for times in zip(*waited, strict=True)],
        "compute_seconds": statistics.median(compute),
        "kernel_bytes": statistics.fmean(a["kernel_bytes"] for a in answers),
        "tagc_bytes": {"gradients": gradients, "parameters": parameters} if counted else None,
        "payload_bytes": answers[0]["payload_bytes"],
        "collectives": answers[0]["collectives"],
    }


def combine_sites(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a cell of sites: of the seconds of a period (with the exchange, and without)
    the slowest rank's, of the rest the mean."""
    periods = zip(*(a["period_seconds"] for a in answers), strict=True)
    numbers = {name: statistics.fmean(a[name] for a in answers) for name in answers[0]
               if name != "period_seconds"}  # fmt: skip
    return {
        **numbers,
        "every": answers[0]["every"],
        "parameters": answers[0]["parameters"],
        "period_seconds": [
            [max(seconds) for seconds in zip(*ranks, strict=True)] for ranks in periods
        ],
    }


def _hashable(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
