"""matplotlib without a display for all plots, and a clear error if it is missing."""

from __future__ import annotations

from typing import Any


class PlotsUnavailableError(RuntimeError):
    """matplotlib is not installed."""


def pyplot() -> Any:
    """``matplotlib.pyplot`` with a backend that draws to files.

    Raises:
        PlotsUnavailableError: if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise PlotsUnavailableError(
            "plots need matplotlib, which is not installed: pip install 'tagc[demo]'"
        ) from error
    matplotlib.use("Agg")
    return __import__("matplotlib.pyplot").pyplot
