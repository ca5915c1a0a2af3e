"""Options that suites share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_outputs(
    parser: argparse.ArgumentParser, file: str | None = None, *, plots: bool = True
) -> None:
    """Add options for the output.

    Args:
        file: default file for results, if the suite always keeps them, so that a second call
            resumes.
        plots: whether the suite draws plots.
    """
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=file and Path(file),
        help="append the results, one per line" if file is None
        else "results, one per line; runs that it already has are not made again (%(default)s)",
    )  # fmt: skip
    if plots:
        parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there, as PNG")
