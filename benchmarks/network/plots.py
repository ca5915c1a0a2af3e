"""Pictures of the results: step time by bandwidth, loss by bytes and by simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.network.results import Results

_WIDTH, _HEIGHT = 5.4, 4.2
_SMOOTHING = 0.9


def draw(results: Sequence[Results], out: Path) -> list[Path]:
    """Write the pictures that the results allow to ``out``; their paths."""
    names = list(dict.fromkeys(method for r in results for method in r.methods))
    palette = colormaps["tab20"]
    colours = {name: palette(i % 20) for i, name in enumerate(names)}
    written = []
    timed = [r for r in results if any(_bandwidths(r, method) for method in r.methods)]
    if timed:
        written.append(_step_times(timed, colours, out / "step-time.png"))
    curves = [r for r in results if any(r.loss(method) for method in r.methods)]
    if curves:
        written.append(_loss_by_bytes(curves, colours, out / "loss-by-bytes.png"))
    for r in curves:
        path = _loss_by_time(r, colours, out / f"loss-by-time-{r.ranks}-ranks.png")
        written += [] if path is None or path in written else [path]
    return written


def _bandwidths(r: Results, method: str) -> list[tuple[float, float]]:
    found = ((rate.bits_per_second, r.step_seconds(method, rate)) for rate in r.rates)
    return [(bits / 1e6, seconds) for bits, seconds in found if bits and seconds]


def _step_times(results: Sequence[Results], colours: dict[str, Any], path: Path) -> Path:
    figure, panels = _panels(len(results))
    for axes, r in zip(panels, results, strict=True):
        for method in r.methods:
            points = _bandwidths(r, method)
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker="o", markersize=4, color=colours[method], label=method)
        axes.set(xscale="log", yscale="log", title=r.title)
        axes.set(xlabel="what a rank may send (Mbit/s)", ylabel="step time (s)")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    return _save(figure, panels, path)


def _loss_by_bytes(results: Sequence[Results], colours: dict[str, Any], path: Path) -> Path:
    figure, panels = _panels(len(results))
    for axes, r in zip(panels, results, strict=True):
        for method in r.methods:
            cell = r.loss(method)
            if cell:
                x = [sent / 1e6 for sent in cell["kernel_bytes"]]
                _curve(axes, x, cell, colours[method], method)
        axes.set(xscale="log", xlabel="MB sent by a rank, parameters included")
        axes.set(ylabel="loss (nats per byte)", title=r.title)
    return _save(figure, panels, path)


def _loss_by_time(r: Results, colours: dict[str, Any], path: Path) -> Path | None:
    rates = [
        rate for rate in r.rates if any(r.simulated_seconds(method, rate) for method in r.methods)
    ]
    if not rates:
        return None
    figure, panels = _panels(len(rates))
    for axes, rate in zip(panels, rates, strict=True):
        for method in r.methods:
            cell, seconds = r.loss(method), r.simulated_seconds(method, rate)
            if cell and seconds:
                _curve(axes, seconds, cell, colours[method], method)
        axes.set(xlabel="simulated time (s)", ylabel="loss (nats per byte)")
        axes.set(title=f"{r.title}, {rate.label}")
    return _save(figure, panels, path)


def _curve(axes: Any, x: Sequence[float], cell: dict[str, Any], colour: Any, label: str) -> None:
    """Training loss, smoothed and pale; validation loss on top."""
    axes.plot(x, _smoothed(cell["losses"]), color=colour, alpha=0.35)
    points = [(x[int(step) - 1], loss) for step, loss in cell["validation"].items()]
    axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=label)


def _smoothed(losses: Sequence[float]) -> list[float]:
    average, smoothed = 0.0, []
    for step, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        smoothed.append(average / (1 - _SMOOTHING**step))  # it starts at the first loss
    return smoothed


def _panels(count: int) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(_WIDTH * count, _HEIGHT), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _save(figure: Figure, panels: Sequence[Any], path: Path) -> Path:
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize="x-small")
    figure.savefig(path, dpi=110)
    return path
