"""Options that several suites have."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_outputs(
    parser: argparse.ArgumentParser, file: str | None = None, *, plots: bool = True
) -> None:
    """Where results go.

    Args:
        file: of the results, if the suite always keeps them, so that a second call goes on.
        plots: whether the suite draws any.
    """
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=file and Path(file),
        help="append the results, one per line" if file is None
        else "results, one per line; runs that it already has are not made again (%(default)s)",
    )  # fmt: skip
    if plots:
        parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there, as PNG")
