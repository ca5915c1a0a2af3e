"""Tables and a plot from the cells of a file, whatever machine measured them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tagc.basics.quantities import format_seconds

from ..figure import Curve, Panel, draw
from ..records import Record, markdown
from .namespaces import Rate
from .results import Results, group

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
            link_table(r),
            predicted_table(r),
        ]
    about = {c["key"]["method"]: c["about"] for c in cells if "method" in c["key"]}
    parts.append("\n".join(f"- `{name}`: {said}" for name, said in about.items()))
    return "\n\n".join(part for part in parts if part)


def plots(cells: Sequence[Record], folder: Path) -> list[Path]:
    """Step time by bandwidth."""
    panels = [
        Panel(
            title=r.title,
            x="what a host may send (Mbit/s)",
            y="step time (s)",
            curves=[_curve(r, method) for method in r.methods],
            log="xy",
        )
        for r in group(cells)
    ]
    return [draw(panels, folder / "network-step-time.png")]


def _curve(r: Results, method: str) -> Curve:
    found = ((rate.bits_per_second, r.step_seconds(method, rate)) for rate in r.rates)
    points = [(bits / 1e6, seconds) for bits, seconds in found if bits and seconds]
    return Curve(label=method, x=[x for x, _ in points], y=[y for _, y in points])


def predicted_table(r: Results) -> str:
    """By how much the model of ``tagc advise`` misses the measured step."""
    rows = []
    for name in r.methods:
        misses = [r.predicted_miss(name, rate) for rate in r.rates]
        if any(miss is not None for miss in misses):
            shown = ["-" if miss is None else f"{100 * miss:+.0f}%" for miss in misses]
            rows.append([f"`{name}`", *shown])
    header = ["predicted less measured", *(rate.label for rate in r.rates)]
    return markdown(header, rows) if rows else ""


def step_table(r: Results) -> str:
    """Step times by link."""
    rows = []
    for method in r.methods:
        if not any(r.steps(method, rate) for rate in r.rates):
            continue
        unlimited = r.steps(method, Rate(None))
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
    return markdown(["step time", "compute", *(rate.label for rate in r.rates)], rows)


def bytes_table(r: Results) -> str:
    """Bytes a host and step: what the kernel counted, what had to be sent, what tagc counts."""
    rows = []
    for method in r.methods:
        cells = [c for rate in r.rates for c in r.steps(method, rate)]
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


def sites_table(r: Results) -> str:
    """Sites beside training without exchange, and the dense methods of every step beside both."""
    rows = []
    for rate in r.rates:
        found = [(_site_label(cell), cell) for m in r.methods for cell in r.sites(m, rate)]
        if not found:
            continue
        alone = statistics.median(p[1] / c["every"] for _, c in found for p in c["period_seconds"])
        dense = [c for name in DENSE for c in r.steps(name, rate)]
        least = min((c["kernel_bytes"] for c in dense), default=None)
        for cell in dense:
            seconds = statistics.fmean(cell["step_seconds"])
            name, sent = cell["key"]["method"], cell["kernel_bytes"]
            rows.append(
                [f"`{name}`, {rate.label}", f"{seconds:.3f} s", f"{alone / seconds:.1%}",
                 f"{sent / 1e3:.1f}", "-" if sent == least else f"{least / sent:.2f}", "-", "-"]
            )  # fmt: skip
        for name, cell in found:
            periods, every, sent = cell["period_seconds"], cell["every"], cell["kernel_bytes"]
            shares = sorted(without / seconds for seconds, without in periods)
            step = statistics.median(seconds for seconds, _ in periods) / every
            rows.append(
                [
                    f"{name}, {rate.label}",
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


def link_table(r: Results) -> str:
    """What the links really do: payload rate of large messages, latency of small ones."""
    rows = []
    for rate in r.rates:
        cells = r.links(rate)
        if not cells:
            continue
        row = [rate.label]
        for probe in ("exchange", "all_gather"):
            bits = statistics.fmean(c[f"{probe}_rate"] for c in cells)
            seconds = statistics.fmean(c[f"{probe}_latency"] for c in cells)
            row.append(f"{bits / 1e6:.0f} Mbit/s, {seconds * 1e3:.2f} ms")
        rows.append(row)
    header = ["link", "messages, receives first", "gloo's all-gather"]
    return markdown(header, rows) if rows else ""


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


def _parameters(r: Results) -> str:
    counts = [c["parameters"] for c in r.cells if "parameters" in c]
    return f"{counts[0] / 1e6:.2f} M " if counts else ""


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}"
