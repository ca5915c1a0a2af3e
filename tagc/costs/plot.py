"""Plots the predicted step against the bandwidth between hosts: ``tagc advise --plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tagc.basics.quantities import format_bandwidth
from tagc.costs.candidates import Advisor

# Decades and points on each side of the bandwidth in question.
_DECADES, _POINTS = 2, 40


def check_format(pyplot: Any, file: str) -> None:
    """Check that the picture can be drawn, before any slow step.

    Args:
        pyplot: ``matplotlib.pyplot``.

    Raises:
        ValueError: if matplotlib does not support the format of the file's suffix.
    """
    figure = pyplot.figure()
    known = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    if Path(file).suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"its suffix is none of {', '.join(sorted(known))}")


def draw(advisor: Advisor, pyplot: Any, file: str) -> None:
    """Draw every candidate that fits and whose plan does not depend on the link.

    Args:
        pyplot: ``matplotlib.pyplot``.
        file: path of the picture. Its suffix determines the format.

    Raises:
        OSError: if the file cannot be written.
    """
    here = advisor.question.link.bandwidth
    steps = range(-_POINTS, _POINTS + 1)
    bandwidths = [here * 10 ** (_DECADES * i / _POINTS) for i in steps]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    among = [c for c in advisor.candidates if advisor.fits(c) and not c.chosen]
    among.sort(key=lambda c: -advisor.cost(c).seconds)  # the legend has the order of the lines
    colours = iter(pyplot.get_cmap("tab20").colors)
    lines = iter(("--", "-", ":", "-."))
    for candidate in among:
        times = [advisor.cost(candidate, bandwidth).seconds for bandwidth in bandwidths]
        style = {"color": next(colours, "gray")}
        if candidate.dense:
            style = {"color": "black", "linestyle": next(lines, "-")}
        axis.plot([8 * b / 1e9 for b in bandwidths], times, label=candidate.name, **style)
    axis.axvline(8 * here / 1e9, color="gray", linewidth=0.8)
    axis.annotate(
        format_bandwidth(here), (8 * here / 1e9, 1.01), xycoords=("data", "axes fraction")
    )
    axis.set(xscale="log", yscale="log", xlabel="bandwidth between hosts, Gbit/s")
    alone = advisor.question.compute is None
    axis.set_ylabel("time on the link, s" if alone else "predicted step, s")
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    try:
        figure.savefig(file, dpi=110, bbox_inches="tight")
    finally:
        pyplot.close(figure)
