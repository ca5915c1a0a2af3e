"""The cells of a network benchmark, grouped, and what follows from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tagc.basics.quantities import format_seconds

from ..records import Record
from .namespaces import Rate
from .predicted import predicted_seconds


@dataclass(frozen=True)
class Results:
    """The cells of one setting of the training, one number of ranks and of them on a host, and one
    latency (seconds)."""

    settings: dict[str, Any]
    ranks: int
    ranks_per_host: int
    cells: Sequence[Record]
    latency: float = 0.0

    @property
    def title(self) -> str:
        """For people."""
        hosts = self.ranks // self.ranks_per_host
        on_hosts = f" on {hosts} hosts" if self.ranks_per_host > 1 else ""
        latency = f", latency {format_seconds(self.latency)}" if self.latency else ""
        return f"{self.ranks} ranks{on_hosts}{latency}"

    @property
    def methods(self) -> list[str]:
        """Names of the methods, in the order of measurement."""
        return list(dict.fromkeys(c["key"]["method"] for c in self.cells if "method" in c["key"]))

    @property
    def rates(self) -> list[Rate]:
        """The links, fastest first."""
        found = {Rate.parse(c["key"]["rate"]) for c in self.cells if "rate" in c["key"]}
        return sorted(found, key=lambda r: -(r.bits_per_second or float("inf")))

    def steps(self, method: str, rate: Rate) -> list[Record]:
        """Step cells of a method on a link; older records have several passes."""
        return self._find("step", method=method, rate=str(rate))

    def sites(self, method: str, rate: Rate) -> list[Record]:
        """Cells of a method whose ranks are sites."""
        return self._find("sites", method=method, rate=str(rate))

    def links(self, rate: Rate) -> list[Record]:
        """Probes of a link, one a pass."""
        return self._find("link", rate=str(rate))

    def step_seconds(self, method: str, rate: Rate) -> float | None:
        """Median step time over all passes."""
        seconds = [s for cell in self.steps(method, rate) for s in cell["step_seconds"]]
        return statistics.median(seconds) if seconds else None

    def predicted_miss(self, method: str, rate: Rate) -> float | None:
        """The predicted step, less the measured one, relative to it; medians over the passes. None
        on the unlimited link, which the model starts from, where it says nothing, and on hosts of
        several ranks, whose bytes inside a host its ledger does not tell from others."""
        unlimited = Rate(None)
        if rate == unlimited or self.ranks_per_host > 1:
            return None
        taken, said = [], []
        for turn in sorted({c["key"].get("pass", 0) for c in self.steps(method, rate)}):
            found = [
                _of_pass(cells, turn)
                for cells in (
                    self.steps(method, rate),
                    self.steps(method, unlimited),
                    self.links(rate),
                    self.links(unlimited),
                )
            ]
            cell, base, link, free = found
            if cell is None or base is None or link is None or free is None:
                continue
            seconds = predicted_seconds(method, cell, base, link, free, self.ranks)
            if seconds is not None:
                said.append(seconds)
                taken.append(statistics.median(cell["step_seconds"]))
        return statistics.median(said) / statistics.median(taken) - 1 if said else None

    def _find(self, kind: str, **where: str) -> list[Record]:
        return [
            cell
            for cell in self.cells
            if cell["key"]["kind"] == kind
            and all(cell["key"].get(name) == value for name, value in where.items())
        ]


def group(cells: Iterable[Record]) -> list[Results]:
    """Cells that may stand in one table, together: of every method the last definition's."""
    cells = list(cells)
    current = {c["key"]["method"]: c["key"]["definition"] for c in cells if "method" in c["key"]}
    grouped: dict[str, Results] = {}
    for cell in cells:
        if cell["key"].get("definition") != current.get(cell["key"].get("method")):
            continue
        settings, ranks = cell["key"]["settings"], cell["key"]["ranks"]
        per_host, latency = cell["key"].get("ranks_per_host", 1), cell["key"].get("latency", 0.0)
        name = json.dumps([settings, ranks, per_host, latency], sort_keys=True)
        before = grouped[name].cells if name in grouped else ()
        grouped[name] = Results(settings, ranks, per_host, (*before, cell), latency)
    return list(grouped.values())


def _of_pass(cells: Iterable[Record], turn: int) -> Record | None:
    return next((cell for cell in cells if cell["key"].get("pass", 0) == turn), None)
