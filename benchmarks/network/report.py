"""Tables and a plot from the cells of a file, whatever machine measured them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tagc.basics.quantities import format_seconds
from tagc.costs import Link, Traffic
from tagc.costs.link import GLOO_REDUCE_SCATTER

from ..figure import Curve, Panel, draw
from ..records import Record, markdown
from .launch import UNLIMITED, bits_per_second, burst, label

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
    results = group(cells)
    parts = ["# Training over a slow network", _facts(cells), NOTES]
    for r in results:
        s = r.settings
        micro = s.get("micro_batches", 1)
        unit = "step" if micro == 1 else f"micro-batch, {micro} of them a step"
        parts += [
            f"## {r.title}, {_parameters(r)}parameters",
            f"GPT of width {s['width']} and {s['layers']} layers, {s['batch']} × {s['context']} "
            f"bytes per rank and {unit}.",
            step_table(r),
            bytes_table(r),
            sites_table(r),
            predicted_table(r),
        ]
    about = {c["key"]["method"]: c["about"] for c in cells if "method" in c["key"]}
    parts.append("\n".join(f"- `{name}`: {said}" for name, said in about.items()))
    return "\n\n".join(part for part in parts if part)


def plots(cells: Sequence[Record], folder: Path) -> list[Path]:
    """Step time by bandwidth."""
    rate, seconds = "what a host may send (Mbit/s)", "step time (s)"
    panels = [
        Panel(r.title, rate, seconds, [_curve(r, method) for method in r.methods], log="xy")
        for r in group(cells)
    ]
    return [draw(panels, folder / "network-step-time.png")]


def _curve(r: Group, method: str) -> Curve:
    limited = (rate for rate in r.rates if rate != UNLIMITED)
    found = ((bits_per_second(rate) / 1e6, r.step_seconds(method, rate)) for rate in limited)
    return Curve(method, [(bits, seconds) for bits, seconds in found if seconds])


def predicted_table(r: Group) -> str:
    """By how much the model of ``tagc advise`` misses the measured step."""
    rows = []
    for name in r.methods:
        misses = [predicted_miss(r, name, rate) for rate in r.rates]
        if any(miss is not None for miss in misses):
            shown = ["-" if miss is None else f"{100 * miss:+.0f}%" for miss in misses]
            rows.append([f"`{name}`", *shown])
    header = ["predicted less measured", *(label(rate) for rate in r.rates)]
    return markdown(header, rows) if rows else ""


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
            if seconds is None:
                row.append("-")
            elif reference is None or method == REFERENCE:
                row.append(f"{seconds:.3f} s")
            else:
                row.append(f"{seconds:.3f} s ({reference / seconds:.2f}×)")
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
        rows.append(
            [
                f"`{method}`",
                _megabytes(kernel),
                f"{kernel / must - 1:+.1%}" if must and r.ranks_per_host == 1 else "-",
                _megabytes(payload.get("parameters", 0)),
                _megabytes(payload.get("gradients", 0)),
                "-" if tagc is None else " + ".join(_megabytes(v) for v in tagc.values() if v),
                f"{sum(cells[-1]['collectives'].values()):.0f}",
            ]
        )
    header = [
        "MB per host and step", "kernel", "over payload", "payload: parameters", "gradients",
        "tagc's count (+ parameters)", "collectives",
    ]  # fmt: skip
    return markdown(header, rows) if rows else ""


def sites_table(r: Group) -> str:
    """Sites beside training without exchange, and the dense methods of every step beside both."""
    rows = []
    for rate in r.rates:
        found = [(_site_label(cell), cell) for m in r.methods for cell in r.find("sites", rate, m)]
        if not found:
            continue
        alone = statistics.median(p[1] / c["every"] for _, c in found for p in c["period_seconds"])
        dense = [c for name in DENSE for c in r.find("step", rate, name)]
        least = min((c["kernel_bytes"] for c in dense), default=None)
        for cell in dense:
            seconds = statistics.fmean(cell["step_seconds"])
            name, sent = cell["key"]["method"], cell["kernel_bytes"]
            rows.append(
                [f"`{name}`, {label(rate)}", f"{seconds:.3f} s", f"{alone / seconds:.1%}",
                 f"{sent / 1e3:.1f}", "-" if sent == least else f"{least / sent:.2f}", "-", "-"]
            )  # fmt: skip
        for name, cell in found:
            periods, every, sent = cell["period_seconds"], cell["every"], cell["kernel_bytes"]
            shares = sorted(without / seconds for seconds, without in periods)
            step = statistics.median(seconds for seconds, _ in periods) / every
            rows.append(
                [
                    f"{name}, {label(rate)}",
                    f"{step:.3f} s",
                    f"{statistics.median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%})",
                    f"{sent / 1e3:.1f}",
                    "-" if least is None else f"{least / sent:.0f}",
                    f"{sent / cell['plan_bytes'] - 1:+.1%}",
                    f"{cell['waited_seconds'] / step:.1%}",
                ]
            )
    header = [
        "sites", "step", "step rate", "KB per host and step", "times fewer than the leanest dense",
        "over the plan", "waited",
    ]  # fmt: skip
    return markdown(header, rows) if rows else ""


def _site_label(cell: Record) -> str:
    taken = cell["key"].get("step_time")
    elsewhere = "" if taken is None else f", {format_seconds(taken)} elsewhere"
    return f"`{cell['key']['method']}`{elsewhere}"


def _facts(cells: Sequence[Record]) -> str:
    names = ("processor", "cores", "kernel", "python", "torch", "tagc", "congestion_control")
    said = [
        f"{name.replace('_', ' ')} {', '.join(dict.fromkeys(str(c[name]) for c in cells))}"
        for name in names
        if all(name in c for c in cells)
    ]
    loads = [c["load"] for c in cells]
    dates = sorted({c["date"] for c in cells})
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(c["command"] for c in cells))
    return (
        f"{dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}; {'; '.join(said)}; load "
        f"average {min(loads):.1f} to {max(loads):.1f} (the ranks' own included).\n\n{commands}"
    )


def _parameters(r: Group) -> str:
    counts = [c["parameters"] for c in r.cells if "parameters" in c]
    return f"{counts[0] / 1e6:.2f} M " if counts else ""


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


def predicted_miss(r: Group, method: str, rate: str) -> float | None:
    """The step that the model behind ``tagc advise`` predicts, less the measured one, relative to
    it; medians over the passes. None on the unlimited link, which the model starts from, where it
    says nothing, and on hosts of several ranks, whose bytes inside a host the ledger does not tell
    from others."""
    if rate == UNLIMITED or r.ranks_per_host > 1:
        return None
    taken, predicted = [], []
    for turn in sorted({c["key"].get("pass", 0) for c in r.find("step", rate, method)}):
        cells = [
            next((c for c in found if c["key"].get("pass", 0) == turn), None)
            for found in (
                r.find("step", rate, method),
                r.find("step", UNLIMITED, method),
                r.find("link", rate),
                r.find("link", UNLIMITED),
            )
        ]
        cell, base, link, free = cells
        if cell is None or base is None or link is None or free is None:
            continue
        seconds = predicted_seconds(method, cell, base, link, free, r.ranks)
        if seconds is not None:
            predicted.append(seconds)
            taken.append(statistics.median(cell["step_seconds"]))
    return statistics.median(predicted) / statistics.median(taken) - 1 if predicted else None


def predicted_seconds(
    method: str, cell: Record, unlimited: Record, probe: Record, free: Record, ranks: int
) -> float | None:
    """A step of the cell, or None where the model says nothing: FSDP1 and gloo's all-to-all, which
    older records have.

    It is the step on the unlimited link of the same pass, with its compute, its codecs and the
    ranks' waiting for each other, and what its bytes take longer here, by the probes of both links.
    What the benchmark's token bucket saves up while ranks compute goes at once. Nothing overlaps on
    a CPU.
    """
    counts = cell["collectives"]
    if method.startswith("fsdp1") or "all_to_all" in counts:
        return None
    # An exchange by messages is a receive and a send for every other rank.
    sends = counts.get("send", 0.0)
    others = sum(n for kind, n in counts.items() if kind not in ("send", "receive"))
    payload = {"gradients": 0.0, "parameters": 0.0} | cell["payload_bytes"]
    reduced = payload["gradients"] if "reduce_scatter" in counts else 0.0
    gathered = payload["parameters"] if "all_gather" in counts else 0.0
    traffic = Traffic(
        collectives=round(others + sends),
        reduced=reduced,
        gathered=gathered,
        all_to_all=payload["gradients"] - reduced + payload["parameters"] - gathered,
    )
    # What a collective costs whatever its size is in the step without a limit.
    here, there = (
        Link(
            bandwidth=p["exchange_rate"] / 8,
            latency=0.0,
            reduce_scatter=GLOO_REDUCE_SCATTER,
            all_gather=p["exchange_rate"] / p["all_gather_rate"],
        ).seconds(traffic, ranks)
        for p in (probe, free)
    )
    rate, compute = cell["key"]["rate"], unlimited["compute_seconds"]
    # The bucket is full at every exchange, if the rank computed long enough before it.
    exchanges = others + sends / (ranks - 1)
    here -= min(8 * burst(rate) * exchanges / bits_per_second(rate), compute)
    waited = statistics.median(unlimited["communication_seconds"])
    return compute + waited + max(0.0, here - there)
