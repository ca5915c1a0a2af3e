"""``scaling``: bytes per rank and unresolved keys for 2 to 1024 ranks, in one process.

How much the ranks' supports overlap is measured on real gradients (the demo's GPT, a batch per
rank), fitted and extrapolated; then as many ranks are simulated with supports drawn from that fit,
through the operators themselves.

| file | idea |
|---|---|
| ``gradients.py`` | real gradients of several ranks, and what they select |
| ``overlap.py`` | union densities: measured, fitted, drawn |
| ``codecs.py`` | encode, sum and decode one shard over many ranks |
| ``report.py`` | tables and pictures from the records |
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tagc.ops import get_ops
from tagc.plots import pyplot

from ..machine import machine
from ..records import Record, append
from .codecs import CODECS, Setting, simulate
from .gradients import rank_gradients, times_selected
from .overlap import LINKS, Overlap, union_densities
from .report import plots, table

__all__ = ["about", "add_arguments", "plots", "run", "table"]

about = "bytes per rank and unresolved keys for 2 to 1024 simulated ranks, by codec"

# Of the symbols that a sketch uses at these numbers of ranks, and of packed elements.
_GROUPS = (1, 2, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--quick", action="store_true", help="a small run, some seconds")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.05, 0.2])
    parser.add_argument("--max-ranks", type=int, default=1024, help="a power of two")
    parser.add_argument("--measured-ranks", type=int, default=32, help="with real gradients")
    parser.add_argument("--train-steps", type=int, default=100, help="before they are taken")
    parser.add_argument("--log2-numel", type=int, default=16, help="elements of a shard")
    parser.add_argument("--ops", help="implementation of the operators")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results, a line each")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write a PNG file there")


def run(args: argparse.Namespace) -> int:
    """Measure, simulate, print the tables."""
    if args.plots:
        pyplot()  # before minutes of work, not after
    if args.quick:
        args.max_ranks, args.measured_ranks = min(args.max_ranks, 16), 4
        args.train_steps, args.log2_numel = 3, 12
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = _run(args)
    finally:
        torch.set_num_threads(threads)
    print("\n" + table(results))
    if args.plots:
        for file in plots(results, args.plots):
            print(f"wrote {file}")
    return 0


def _run(args: argparse.Namespace) -> list[Record]:
    facts = {"suite": "scaling"} | machine()
    results: list[Record] = []

    def add(record: Record) -> None:
        results.append(facts | record)
        if args.json:
            append(args.json, results[-1])

    print("gradients ...", file=sys.stderr, flush=True)
    gradients = rank_gradients(args.measured_ranks, steps=args.train_steps)
    ops = get_ops("cpu", args.ops)
    for density in args.densities:
        overlap = {}
        for group in _GROUPS:
            selected = times_selected(gradients, group, density)
            measured = union_densities(selected, args.measured_ranks)
            fits = {link: Overlap.fit(measured, link) for link in LINKS}
            overlap[group] = fits["probit"]
            add(
                {
                    "kind": "union",
                    "density": density,
                    "group": group,
                    "train_steps": args.train_steps,
                    "measured": {str(w): u for w, u in measured.items()},
                    "misfit": overlap[group].misfit(measured),
                    "spread": {link: fit.spread for link, fit in fits.items()},
                    "extrapolated": {link: f.union(args.max_ranks) for link, f in fits.items()},
                }
            )
        worlds = [2**i for i in range(1, args.max_ranks.bit_length()) if 2**i <= args.max_ranks]
        for world_size in worlds:
            print(f"density {density:g}, {world_size} ranks", file=sys.stderr, flush=True)
            setting = Setting(
                numel=1 << args.log2_numel,
                world_size=world_size,
                density=density,
                overlap=overlap,
            )
            where = {"kind": "codec", "density": density, "world_size": world_size}
            where["numel"] = setting.numel
            for name in CODECS:
                add(where | simulate(name, setting, ops))
    return results
