"""The demo's output: a table (Markdown), numbers (JSON, CSV) and a picture (PNG)."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

NOTE = """\
Bytes are what one rank sends in a training step: gradients in reduce-scatters, parameters in
all-gathers. For plain FSDP2 they are those of ideal fp32 collectives (gloo's own reduce-scatter
sends twice as many), for the others they are counted from what was handed to the collectives.
Ratios are to plain FSDP2. Step time is the median.
"""
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
    """Median over the steps, the first few left out."""
    gradient_bytes_per_step: float
    parameter_bytes_per_step: float
    dense_gradient_bytes_per_step: float
    dense_parameter_bytes_per_step: float
    density_target: float | None = None
    density: float | None = None
    unresolved: int | None = None
    residual_norm: float | None = None
    parameter_error: float | None = None

    @property
    def final_loss(self) -> float:
        return self.validation_losses[max(self.validation_losses)]


def write_report(runs: Sequence[Run], settings: dict[str, object], out: Path) -> str:
    """Write summary.md, summary.json, losses.csv and losses.png to `out`; return the table."""
    out.mkdir(parents=True, exist_ok=True)
    rows = table(runs)
    (out / "summary.md").write_text(f"{rows}\n{NOTE}", encoding="utf-8")
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
    return rows


def table(runs: Sequence[Run]) -> str:
    """The comparison as a Markdown table, padded so that it reads well in a terminal too."""
    header = (
        "run",
        "val. loss",
        "gap",
        "gradients/step",
        "ratio",
        "parameters/step",
        "ratio",
        "ratio, all",
        "step time",
        "density (target)",
        "unresolved",
    )
    cells = [header, *(_row(run, runs) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Validation (markers) and smoothed training loss, over steps and over bytes sent."""
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


def _row(run: Run, runs: Sequence[Run]) -> tuple[str, ...]:
    plain = next((other for other in runs if other.unresolved is None), None)
    gap = f"{100 * (run.final_loss / plain.final_loss - 1):+.2f}%" if plain else "-"
    gradients, parameters = run.gradient_bytes_per_step, run.parameter_bytes_per_step
    dense = run.dense_gradient_bytes_per_step, run.dense_parameter_bytes_per_step
    target, density = run.density_target, run.density
    return (
        run.name,
        f"{run.final_loss:.4f}",
        "-" if run is plain else gap,
        f"{gradients / 1e6:.3f} MB",
        _ratio(dense[0], gradients),
        f"{parameters / 1e6:.3f} MB",
        _ratio(dense[1], parameters),
        _ratio(sum(dense), gradients + parameters),
        f"{1e3 * run.step_seconds:.0f} ms",
        "-" if density is None or target is None else f"{density:.2%} ({target:.2%})",
        "-" if run.unresolved is None else str(run.unresolved),
    )


def _ratio(dense: float | None, wire: float | None) -> str:
    return f"{dense / wire:.2f}×" if dense and wire else "-"


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
