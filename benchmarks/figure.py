"""All plots of the benchmarks: panels side by side, each with curves on one pair of axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tagc.basics.plots import pyplot, save

_COLUMNS = 4


class Curve(NamedTuple):
    """Points in order; ``style`` goes to matplotlib's ``plot``."""

    label: str
    points: Sequence[tuple[Any, Any]]
    style: Mapping[str, Any] = {}


class Panel(NamedTuple):
    """One pair of axes; ``log`` names those with a logarithmic scale: ``""``, ``"x"``, ``"xy"``."""

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log: str = ""


def draw(panels: Sequence[Panel], file: Path, *, height: float = 4.2) -> Path:
    """Write a figure as PNG, at most 4 panels side by side; a label has the same colour in all.

    Raises:
        PlotsUnavailableError: if matplotlib is not installed.
    """
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    size = (5.4 * columns, height * rows)
    figure, grid = pyplot().subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False
    )
    axes = grid.flatten()
    for empty in axes[len(panels) :]:
        empty.remove()
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    palette = pyplot().get_cmap("tab20")
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=False):
        for label, points, style in panel.curves:
            x, y = zip(*points, strict=True) if points else ((), ())
            look = {"color": palette(labels.index(label) % 20), "marker": "o", "ms": 3, "lw": 1.2}
            (handles[label],) = axis.plot(x, y, label=label, **{**look, **style})
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.set_title(panel.title, fontsize=10)
        for letter in panel.log:
            axis.set(**{f"{letter}scale": "log"})
            getattr(axis, f"{letter}axis").set_major_formatter("{x:g}")
        if "y" in panel.log:
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    if len(handles) > 1:
        place = {"loc": "outside right upper", "fontsize": "x-small", "frameon": False}
        figure.legend(handles.values(), handles.keys(), **place)
    return save(figure, file)
