"""The demo's output: a table (Markdown), numbers (JSON, CSV) and a picture (PNG)."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BYTES_NOTE = """\
Bytes are what one rank sends in a step after the warm-up: gradients and parameters, in bf16 without
a rule. For plain FSDP2 they are those of ideal collectives (gloo's reduce-scatter sends twice as
many); for the others they are counted from what was handed to the collectives. Ratios are to plain
FSDP2.
"""
PREDICTED_NOTE = """\
A step's time here is the median. On a link it is predicted: the time here, plus the time that the
bytes take on the link.
"""
MEASURED_NOTE = """\
A step's time is the median, measured on the link.
"""
# Bits per second.
LINKS = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
COLOURS = ("#555555", "#0072b2", "#d55e00", "#009e73")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. `train_losses[i]` belongs to step i + 1, losses are means over ranks.

    Fields that hold None do not apply.
    """

    name: str
    train_losses: list[float]
    validation_losses: dict[int, float]
    """By the number of steps done."""
    wire_bytes: list[int]
    """Bytes that a rank has sent after each step; a warm-up costs more."""
    step_seconds: float
    """Median over the steps after the policy's warm-up, the first few left out."""
    gradient_bytes_per_step: float
    """Mean over the same steps, as for parameters."""
    parameter_bytes_per_step: float
    dense_gradient_bytes_per_step: float
    dense_parameter_bytes_per_step: float
    density_target: float | None = None
    density: float | None = None
    unresolved: int | None = None
    residual_norm: float | None = None
    parameter_error: float | None = None

    @property
    def plain(self) -> bool:
        return self.unresolved is None

    @property
    def bytes_per_step(self) -> float:
        return self.gradient_bytes_per_step + self.parameter_bytes_per_step

    @property
    def dense_bytes_per_step(self) -> float:
        return self.dense_gradient_bytes_per_step + self.dense_parameter_bytes_per_step

    @property
    def final_loss(self) -> float:
        return self.validation_losses[max(self.validation_losses)]


def write_report(
    runs: Sequence[Run], settings: dict[str, object], out: Path, link: str | None = None
) -> str:
    """Write summary.md, summary.json, losses.csv and losses.png to `out`; return the table.

    `link` names the link that the ranks were on; None predicts times on links from bytes.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = table(runs, link)
    note = BYTES_NOTE + (MEASURED_NOTE if link else PREDICTED_NOTE)
    (out / "summary.md").write_text(f"{rows}\n{note}", encoding="utf-8")
    summary = {"settings": settings, "runs": [_summary(run) for run in runs]}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    with (out / "losses.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "step", "wire_bytes", "train_loss", "validation_loss"))
        for run in runs:
            curve = zip(run.train_losses, run.wire_bytes, strict=True)
            for step, (loss, sent) in enumerate(curve, start=1):
                writer.writerow((run.name, step, sent, loss, run.validation_losses.get(step)))
    plot(runs, out / "losses.png")
    return f"{rows}\n{note}"


def table(runs: Sequence[Run], link: str | None) -> str:
    """The comparison as a Markdown table, padded so that it reads well in a terminal too."""
    plain = next((run for run in runs if run.plain), None)
    times = [f"step, {link}"] if link else ["step here", *(f"on {name}" for name in LINKS)]
    cells = [["run", "val. loss", "gap", "sent/step", "ratio", *times]]
    for run in runs:
        cells.append(_row(run, plain, link))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Validation (markers) and smoothed training loss, over steps and over bytes sent."""
    from matplotlib.figure import Figure  # the table needs none of it

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for run, colour in zip(runs, COLOURS, strict=False):
        smoothed = _smoothed(run.train_losses)
        steps = range(1, len(smoothed) + 1)
        for axes, x in ((by_step, steps), (by_bytes, [sent / 1e6 for sent in run.wire_bytes])):
            axes.plot(x, smoothed, color=colour, alpha=0.45, label=f"{run.name}, training")
            axes.plot(
                [x[step - 1] for step in run.validation_losses],
                list(run.validation_losses.values()),
                color=colour,
                marker="o",
                markersize=4,
                label=f"{run.name}, validation",
            )
    by_step.set(xlabel="steps", ylabel="loss (nats per byte)", title="The same steps")
    by_bytes.set(xlabel="bytes sent per rank (MB)", title="The same bytes")
    # With the fall from the first loss, the runs' differences would look flat.
    losses = [loss for run in runs for loss in run.validation_losses.values()]
    by_step.set_ylim(0.95 * min(losses), 1.1 * max(losses))
    first_bytes = min(run.wire_bytes[min(run.validation_losses) - 1] for run in runs)
    if first_bytes:  # one rank alone sends nothing
        # Bytes differ by a factor, which a logarithm shows as a distance.
        by_bytes.set_xscale("log")
        by_bytes.set_xlim(left=first_bytes / 2 / 1e6)
        by_bytes.xaxis.set_major_formatter("{x:g}")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.legend(frameon=False)
    figure.savefig(path, dpi=110)


def _row(run: Run, plain: Run | None, link: str | None) -> list[str]:
    sent, seconds = run.bytes_per_step, run.step_seconds
    # On the CPU nothing overlaps; the loopback's own share of the time is small.
    times = (
        [seconds] if link else [seconds, *(seconds + 8 * sent / bits for bits in LINKS.values())]
    )
    gap = "-"
    if plain and run is not plain:
        gap = f"{100 * (run.final_loss / plain.final_loss - 1):+.2f}%"
    return [
        run.name,
        f"{run.final_loss:.4f}",
        gap,
        f"{sent / 1e6:.2f} MB",
        f"{run.dense_bytes_per_step / sent:.2f}×" if sent else "-",
        *(f"{1e3 * time:.0f} ms" for time in times),
    ]


def _summary(run: Run) -> dict[str, object]:
    # The curves are in losses.csv.
    numbers = asdict(run)
    for curve in ("train_losses", "validation_losses", "wire_bytes"):
        del numbers[curve]
    return {**numbers, "validation_loss": run.final_loss}


def _smoothed(losses: Sequence[float], decay: float = 0.9) -> list[float]:
    """Moving average with Adam's bias correction, so that it starts at the first loss."""
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = decay * average + (1 - decay) * loss
        smoothed.append(average / (1 - decay**step))
    return smoothed
