"""Tables from the lines of a results file, whatever machine wrote it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.network.cells import Cell, read_cells
from benchmarks.network.namespaces import Rate
from benchmarks.network.plots import draw
from benchmarks.network.results import Results, group

# What others are compared with: dense fp32 without gloo's waste, in both directions of the link
# at once, as tagc's messages travel.
REFERENCE = "fp32-messages"
# The published sketch has half a cell of 4 bytes per element; its index adds so many bits.
_PUBLISHED_CELL_BYTES, _PUBLISHED_INDEX_BITS = 2.0, (1, 4)

NOTES = """\
Step time is the median over the timed steps of the slowest rank's; × is to `{reference}` on the
same link. Compute is a step of the unlimited link less the time that the rank waits in collectives
(FSDP on a CPU does not overlap them). The kernel's bytes are `tx_bytes` of the host's interface,
TCP/IP headers and acknowledgements included, with headers counted once for each large packet of the
segmentation offload; headers on the wire are those of every packet, as the shaper counts them.
Payload is what a rank must send for the collectives it starts, to its own host, too: less than the
kernel counts where gloo's reduce-scatter sends twice what it must. On hosts of several ranks tagc's
count is what all of them send to other hosts. Links are probed with gloo's collectives and with
point-to-point messages whose receives are posted first: gloo's own post them behind the data that
goes the same way, and then one direction often waits for the other.
"""


def write(file: Path, out: Path) -> str:
    """Write ``report.md`` and the pictures to ``out`` and return the report, from a results file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds no results.
    """
    if not file.exists():
        raise FileNotFoundError(f"no such file: {file}")
    cells = read_cells(file)
    if not cells:
        raise ValueError(f"{file} has no results")
    results = group(cells)
    text = markdown(results)
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw(results, out)
    links = "\n".join(f"![{path.stem.replace('-', ' ')}]({path.name})" for path in pictures)
    (out / "report.md").write_text(f"{text}\n{links}\n", encoding="utf-8")
    return text


def markdown(results: Sequence[Results]) -> str:
    """The whole report but its pictures."""
    parts = ["# Training over a slow network\n", _facts(results), NOTES.format(reference=REFERENCE)]
    for r in results:
        s = r.settings
        gathered = "twice" if s["reshard"] else "once"
        micro = s.get("micro_batches", 1)
        unit = "step" if micro == 1 else f"micro-batch, {micro} of them a step"
        parts += [
            f"## {r.title}, {_parameters(r)}parameters\n",
            f"GPT of width {s['width']} and {s['layers']} layers, {s['batch']} × {s['context']} "
            f"bytes per rank and {unit}, a block's parameters gathered {gathered} in each.\n",
            step_table(r),
            bytes_table(r),
            loss_table(r),
            link_table(r),
            predicted_table(r),
        ]
    parts.append(_legend(results))
    return "\n".join(part for part in parts if part)


def predicted_table(r: Results) -> str:
    """By how much the model of ``tagc advise`` misses the measured step."""
    rows = []
    for name in r.methods:
        misses = [r.predicted_miss(name, rate) for rate in r.rates]
        if any(miss is not None for miss in misses):
            shown = ["-" if miss is None else f"{100 * miss:+.0f}%" for miss in misses]
            rows.append([f"`{name}`", *shown])
    header = ["predicted less measured", *(rate.label for rate in r.rates)]
    return _table(header, rows) if rows else ""


def step_table(r: Results) -> str:
    """Step times by link."""
    rows = []
    for method in r.methods:
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
    return _table(["step time", "compute", *(rate.label for rate in r.rates)], rows)


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
        shaped = [c["shaped_bytes"] for c in cells if c["shaped_bytes"]]
        tagc = cells[-1]["tagc_bytes"]
        rows.append(
            [
                f"`{method}`",
                _megabytes(kernel),
                _megabytes(max(c["kernel_bytes_max"] for c in cells)),
                f"{kernel / must - 1:+.1%}" if must and r.ranks_per_host == 1 else "-",
                _megabytes(statistics.fmean(shaped)) if shaped else "-",
                _megabytes(payload.get("parameters", 0)),
                _megabytes(payload.get("gradients", 0)),
                "-" if tagc is None else " + ".join(_megabytes(v) for v in tagc.values() if v),
                _published(cells[-1], r.ranks),
                f"{sum(cells[-1]['collectives'].values()):.0f}",
            ]
        )
    header = [
        "MB per host and step",
        "kernel, mean",
        "max",
        "over payload",
        "with all headers",
        "payload: parameters",
        "gradients",
        "tagc's count (+ parameters)",
        "published (1 / 4 bit index)",
        "collectives",
    ]
    return _table(header, rows) if rows else ""


def published_bytes(
    compressed: int, parameters: int, ranks: int, index_bits: int, itemsize: int = 4
) -> float:
    """Gradient bytes that a rank would send in the TAGC paper's own formats, on paper.

    Half a float32 cell per compressed element is reduced to its owner, an index of 1 or 4 bits
    per element all-reduced, and the other elements reduce-scattered.

    Args:
        compressed: elements of the gradient that are compressed, of ``parameters``.
    """
    share = (ranks - 1) / ranks
    dense = max(0, parameters - compressed) * itemsize
    return share * (compressed * (_PUBLISHED_CELL_BYTES + 2 * index_bits / 8) + dense)


def loss_table(r: Results) -> str:
    """Validation losses after the same steps."""
    rows = []
    reference = r.loss(REFERENCE)
    best = _last(reference) if reference else None
    for method in r.methods:
        cell = r.loss(method)
        if cell is None:
            continue
        loss = _last(cell)
        gap = "-" if best is None or method == REFERENCE else f"{100 * (loss / best - 1):+.2f}%"
        sent = cell["kernel_bytes"][-1] / len(cell["kernel_bytes"])
        rows.append([f"`{method}`", str(len(cell["losses"])), f"{loss:.4f}", gap, _megabytes(sent)])
    header = ["loss", "steps", "validation", f"to `{REFERENCE}`", "MB per step, warm-up included"]
    return _table(header, rows) if rows else ""


def link_table(r: Results) -> str:
    """What the links really do: payload rate of large messages, latency of small ones."""
    rows = []
    for rate in r.rates:
        cells = r.links(rate)
        if not cells:
            continue
        row = [rate.label]
        for probe in ("exchange", "all_to_all", "all_gather"):
            bits = statistics.fmean(c[f"{probe}_rate"] for c in cells)
            seconds = statistics.fmean(c[f"{probe}_latency"] for c in cells)
            row.append(f"{bits / 1e6:.0f} Mbit/s, {seconds * 1e3:.2f} ms")
        rows.append(row)
    header = ["link", "messages, receives first", "gloo's all-to-all", "gloo's all-gather"]
    return _table(header, rows) if rows else ""


def _published(cell: Cell, ranks: int) -> str:
    if not cell["published"] or cell["compressed_elements"] is None:
        return "-"
    return " / ".join(
        _megabytes(published_bytes(cell["compressed_elements"], cell["parameters"], ranks, bits))
        for bits in _PUBLISHED_INDEX_BITS
    )


def _last(cell: Cell) -> float:
    return cell["validation"][max(cell["validation"], key=int)]


def _facts(results: Sequence[Results]) -> str:
    cells = [cell for r in results for cell in r.cells]
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
        f"average {min(loads):.1f} to {max(loads):.1f} (the ranks' own included).\n\n{commands}\n"
    )


def _parameters(r: Results) -> str:
    counts = [c["parameters"] for c in r.cells if "parameters" in c]
    return f"{counts[0] / 1e6:.2f} M " if counts else ""


def _legend(results: Sequence[Results]) -> str:
    headers = {
        c["key"]["method"]: c["about"] for r in results for c in r.cells if "method" in c["key"]
    }
    return "\n".join(f"- `{name}`: {about}" for name, about in headers.items()) + "\n"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, padded so that it reads well in a terminal, too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in (header, *rows)
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines) + "\n"
