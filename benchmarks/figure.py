"""All plots of the benchmarks: panels side by side, each with curves on one pair of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tagc.basics.plots import pyplot, save

_COLUMNS = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points in order; ``style`` goes to matplotlib's ``plot``."""

    label: str
    x: Sequence[float]
    y: Sequence[Any]
    style: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        log: axes with a logarithmic scale: ``""``, ``"x"``, ``"y"`` or ``"xy"``.
        from_zero: whether the y axis begins at zero.
    """

    x: str
    y: str
    curves: Sequence[Curve]
    title: str = ""
    log: str = ""
    from_zero: bool = False


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
    for axis, panel in zip(axes, panels, strict=False):
        for curve in panel.curves:
            colour = {"color": palette(labels.index(curve.label) % 20)}
            style = colour | {"marker": "o", "ms": 3, "lw": 1.2} | curve.style
            axis.plot(curve.x, curve.y, label=curve.label, **style)
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.set_title(panel.title, fontsize=10)
        for letter in panel.log:
            axis.set(**{f"{letter}scale": "log"})
            getattr(axis, f"{letter}axis").set_major_formatter("{x:g}")
        if "y" in panel.log:
            axis.yaxis.set_minor_formatter("{x:g}")
        if panel.from_zero:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle
        for axis in axes[: len(panels)]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if len(handles) > 1:
        place = {"loc": "outside right upper", "fontsize": "x-small", "frameon": False}
        figure.legend(handles.values(), handles.keys(), **place)
    return save(figure, file)
