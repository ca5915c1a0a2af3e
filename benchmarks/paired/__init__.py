"""``paired``: low-bit methods beside dense, seed by seed, with intervals.

Two runs of a pair share the data, the order of it and the initialization, so that their difference
says more than their losses. Dense's learning rate is swept, and everything else trains at dense's
best: nobody searches another one at scale. At the end the rate is zero, the last evaluations are
averaged, and the held-out set is large. A line whose interval contains dense is called equal.

| file | idea |
|---|---|
| ``settings.py`` | in what runs differ beside the method: batch, ranks, optimizer, and so on |
| ``pairs.py`` | which runs to make: dense's rates, then seeds until intervals are small enough |
| ``intervals.py`` | means with intervals |
| ``report.py`` | the table |
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..convergence.sweep import Results, make
from ..machine import machine
from .pairs import LINES, Pairs
from .report import table
from .settings import SETTINGS

__all__ = ["about", "add_arguments", "run", "table"]

about = "low-bit methods at dense's best learning rate, seed by seed, with confidence intervals"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--settings", help=f"separated by ';', of: {'; '.join(SETTINGS)}")
    add("--lines", help=f"separated by ';', of: {'; '.join(LINES)}")
    add("--seeds", type=int, nargs=2, default=(3, 8), metavar=("MIN", "MAX"), help="of a line")
    add(
        "--within",
        type=float,
        default=0.3,
        metavar="PERCENT",
        help="add seeds while an interval's half is wider than this (default: %(default)s)",
    )
    add("--jobs", type=int, default=1, help="runs at a time, each in a process and one thread")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        default=Path("runs/paired.jsonl"),
        help="results, a line each; runs that are in it are not made again (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, print the table."""
    wrong = []
    chosen: list[list[str]] = []
    for asked, known in ((args.settings, SETTINGS), (args.lines, LINES)):
        names = [name.strip() for name in asked.split(";")] if asked else list(known)
        wrong += [f"unknown: {n!r}; there are: {'; '.join(known)}" for n in names if n not in known]
        chosen.append(names)
    least, most = args.seeds
    if not 2 <= least <= most:
        wrong.append(f"--seeds {least} {most}: an interval needs 2 at least, and MIN <= MAX")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    settings, lines = chosen
    results = Results(args.json, {"suite": "paired"} | machine("cpu"))
    pairs = Pairs(
        settings=[SETTINGS[name] for name in settings],
        lines=[LINES[name] for name in lines],
        seeds=(least, most),
        within=args.within / 100,
    )
    try:
        make(
            pairs,
            results,
            jobs=args.jobs,
            device="cpu",
            show=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
    print("\n" + table(results.records))
    return 0
