"""``report``: table and plots from the JSON lines of earlier runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .records import read

about = "tables and plots from the records of earlier runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE.jsonl",
        help="records, such as those in benchmarks/results",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there, as PNG")


def run(args: argparse.Namespace) -> int:
    """Print the table of every suite in the files; return 1 if there was nothing to draw."""
    from .suites import SUITES, load

    try:
        records = read(args.files)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    drawn = 0
    for name in dict.fromkeys(r.get("suite") for r in records):
        suite = load(name) if name in SUITES else None
        if suite is None or not hasattr(suite, "table"):
            print(f"no suite draws the records of {name!r}", file=sys.stderr)
            continue
        of_suite = [r for r in records if r.get("suite") == name]
        print(suite.table(of_suite) + "\n")
        drawn += 1
        if args.plots and hasattr(suite, "plots"):
            for file in suite.plots(of_suite, args.plots):
                print(f"wrote {file}")
    return 0 if drawn else 1
