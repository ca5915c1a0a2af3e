"""Tables and a plot from the cells of a file, whatever machine measured them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tagc.basics.plots import pyplot
from tagc.basics.quantities import format_seconds

from ..records import Record, markdown
from .launch import UNLIMITED, bits_per_second, label

# What others are compared with: dense fp32 without gloo's waste, in both directions of the link
# at once, as tagc's messages travel.
REFERENCE = "fp32-messages"
# Data parallelism in every step, beside sites.
DENSE = ("ddp-bf16", "bf16-wire-messages")

NOTES = f"""\
Step time is the median over the timed steps of the slowest rank; × is relative to `{REFERENCE}` on
the same link. Compute is a step on the unlimited link less the time that the rank waits in
collectives (FSDP on a CPU does not overlap them). The kernel's bytes are `tx_bytes` of the host's
interface, with TCP/IP headers counted once for each large packet of the segmentation offload.
Payload is what a rank must send for the collectives it starts, to its own host, too: less than the
kernel counts where gloo's reduce-scatter sends twice what it must. On hosts of several ranks,
tagc's count is what all of them send to other hosts. Sites train in turns with as many steps
without any exchange. The step rate is relative to those: the median over periods of one exchange
each (and the range), of the slowest rank. Waiting is the mean over ranks."""


def table(cells: Sequence[Record]) -> str:
    """The whole report."""
    parts = ["# Training over a slow network", _facts(cells), NOTES]
    for r in group(cells):
        s = r.settings
        micro = s.get("micro_batches", 1)
        unit = "step" if micro == 1 else f"micro-batch, {micro} of them a step"
        model = f"GPT of width {s['width']} and {s['layers']} layers"
        batch = f"{s['batch']} × {s['context']} bytes per rank and {unit}"
        parts += [f"## {r.title}", f"{model}, {batch}."]
        parts += [step_table(r), bytes_table(r), sites_table(r)]
    about = {c["key"]["method"]: c["about"] for c in cells if "method" in c["key"]}
    parts.append("\n".join(f"- `{name}`: {text}" for name, text in about.items()))
    return "\n\n".join(part for part in parts if part)


def plot(cells: Sequence[Record], folder: Path) -> Path:
    """Step time by bandwidth, a panel for each group.

    Raises:
        PlotsUnavailableError: if matplotlib is not installed.
    """
    groups = group(cells)
    size: Any = {"figsize": (5.4 * len(groups), 4.2), "layout": "constrained"}
    figure, grid = pyplot().subplots(1, len(groups), squeeze=False, **size)
    methods = list(dict.fromkeys(method for r in groups for method in r.methods))
    palette = pyplot().get_cmap("tab20")
    handles: dict[str, Any] = {}
    for axis, r in zip(grid[0], groups, strict=True):
        for method in r.methods:
            limited = {rate: r.step_seconds(method, rate) for rate in r.rates if rate != UNLIMITED}
            points = {bits_per_second(rate) / 1e6: s for rate, s in limited.items() if s}
            look = {"color": palette(methods.index(method) % 20), "marker": "o", "ms": 3, "lw": 1.2}
            (handles[method],) = axis.plot([*points], [*points.values()], **look)
        axis.set(xlabel="what a host may send (Mbit/s)", ylabel="step time (s)")
        axis.set(xscale="log", yscale="log")
        axis.set_title(r.title, fontsize=10)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.25)
    place = {"loc": "outside right upper", "fontsize": "x-small", "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "network-step-time.png"
    figure.savefig(file, dpi=90, bbox_inches="tight")
    pyplot().close(figure)
    return file


def step_table(r: Group) -> str:
    """Step times by link."""
    rows = []
    for method in r.methods:
        if not any(r.find("step", rate, method) for rate in r.rates):
            continue
        unlimited = r.find("step", UNLIMITED, method)
        compute = statistics.fmean(c["compute_seconds"] for c in unlimited) if unlimited else None
        row = [f"`{method}`", "-" if compute is None else f"{compute:.3f} s"]
        for rate in r.rates:
            seconds, reference = r.step_seconds(method, rate), r.step_seconds(REFERENCE, rate)
            row.append("-" if seconds is None else f"{seconds:.3f} s")
            if seconds and reference and method != REFERENCE:
                row[-1] += f" ({reference / seconds:.2f}×)"
        rows.append(row)
    return markdown(["step time", "compute", *(label(rate) for rate in r.rates)], rows)


def bytes_table(r: Group) -> str:
    """Bytes a host and step: what the kernel counted, what had to be sent, what tagc counts."""
    rows = []
    for method in r.methods:
        cells = [c for rate in r.rates for c in r.find("step", rate, method)]
        if not cells:
            continue
        kernel = statistics.fmean(c["kernel_bytes"] for c in cells)
        payload = cells[-1]["payload_bytes"]
        must = sum(payload.values())
        tagc = cells[-1]["tagc_bytes"]
        over = f"{kernel / must - 1:+.1%}" if must and r.ranks_per_host == 1 else "-"
        ways = [_megabytes(payload.get(name, 0)) for name in ("parameters", "gradients")]
        ours = "-" if tagc is None else " + ".join(_megabytes(v) for v in tagc.values() if v)
        started = f"{sum(cells[-1]['collectives'].values()):.0f}"
        rows.append([f"`{method}`", _megabytes(kernel), over, *ways, ours, started])
    header = [
        "MB per host and step", "kernel", "over payload", "payload: parameters", "gradients",
        "tagc's count (+ parameters)", "collectives",
    ]  # fmt: skip
    return markdown(header, rows) if rows else ""


def sites_table(r: Group) -> str:
    """Sites beside training without exchange, and the dense methods of every step beside both."""
    rows = []
    for rate in r.rates:
        found = [cell for method in r.methods for cell in r.find("sites", rate, method)]
        if not found:
            continue
        alone = statistics.median(p[1] / c["every"] for c in found for p in c["period_seconds"])
        dense = [c for name in DENSE for c in r.find("step", rate, name)]
        least = min((c["kernel_bytes"] for c in dense), default=None)
        for cell in dense:
            seconds = statistics.fmean(cell["step_seconds"])
            name, sent = cell["key"]["method"], cell["kernel_bytes"]
            rows.append(
                [f"`{name}`, {label(rate)}", f"{seconds:.3f} s", f"{alone / seconds:.1%}",
                 f"{sent / 1e3:.1f}", "-" if sent == least else f"{least / sent:.2f}", "-", "-"]
            )  # fmt: skip
        for cell in found:
            taken, name = cell["key"].get("step_time"), f"`{cell['key']['method']}`"
            name += "" if taken is None else f", {format_seconds(taken)} elsewhere"
            periods, every, sent = cell["period_seconds"], cell["every"], cell["kernel_bytes"]
            shares = sorted(without / seconds for seconds, without in periods)
            share = f"{statistics.median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%})"
            step = statistics.median(seconds for seconds, _ in periods) / every
            row = [f"{name}, {label(rate)}", f"{step:.3f} s", share, f"{sent / 1e3:.1f}"]
            row.append("-" if least is None else f"{least / sent:.0f}")
            row.append(f"{sent / cell['plan_bytes'] - 1:+.1%}")
            rows.append([*row, f"{cell['waited_seconds'] / step:.1%}"])
    header = [
        "sites", "step", "step rate", "KB per host and step", "times fewer than the leanest dense",
        "over the plan", "waited",
    ]  # fmt: skip
    return markdown(header, rows) if rows else ""


def _facts(cells: Sequence[Record]) -> str:
    names = ("processor", "cores", "kernel", "python", "torch", "tagc", "congestion_control")
    values = {name: dict.fromkeys(str(c[name]) for c in cells if name in c) for name in names}
    values_of = [f"{name.replace('_', ' ')} {', '.join(found)}" for name, found in values.items()]
    loads, dates = [c["load"] for c in cells], [c["date"] for c in cells]
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(c["command"] for c in cells))
    return (
        f"{min(dates)} to {max(dates)}; {'; '.join(values_of)}; load average {min(loads):.1f} to "
        f"{max(loads):.1f} (the ranks' own included).\n\n{commands}"
    )


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}"


@dataclass(frozen=True)
class Group:
    """Cells that may stand in one table: of one setting of the training, one number of ranks and of
    them on a host, and one latency (seconds)."""

    settings: dict[str, Any]
    ranks: int
    ranks_per_host: int
    latency: float
    cells: list[Record]

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
    def rates(self) -> list[str]:
        """The links, fastest first."""
        return sorted({c["key"]["rate"] for c in self.cells}, key=bits_per_second, reverse=True)

    def find(self, kind: str, rate: str, method: str | None = None) -> list[Record]:
        """Cells of a kind on a link; older records have several passes."""
        wanted = {"kind": kind, "rate": rate} | ({"method": method} if method else {})
        return [cell for cell in self.cells if wanted.items() <= cell["key"].items()]

    def step_seconds(self, method: str, rate: str) -> float | None:
        """Median step time over all passes."""
        seconds = [s for cell in self.find("step", rate, method) for s in cell["step_seconds"]]
        return statistics.median(seconds) if seconds else None


def group(cells: Iterable[Record]) -> list[Group]:
    """The groups of all cells, of every method with its last definition."""
    cells = list(cells)
    current = {c["key"]["method"]: c["key"]["definition"] for c in cells if "method" in c["key"]}
    found: dict[str, Group] = {}
    for cell in cells:
        key = cell["key"]
        if key.get("definition") != current.get(key.get("method")):
            continue
        about = key["settings"], key["ranks"], key.get("ranks_per_host", 1), key.get("latency", 0.0)
        found.setdefault(json.dumps(about, sort_keys=True), Group(*about, [])).cells.append(cell)
    return list(found.values())
