"""``convergence``: validation loss against bits per element, on simulated ranks in one process.

A byte-level GPT trains on the standard library's source; the gradient of every simulated rank goes
through the library's own codecs and feedback (``ranks.py``). Every method has its learning rate
swept, and none is compared at another's.

| file | idea |
|---|---|
| ``methods.py`` | what is compared, and with which optimizer |
| ``ranks.py`` | simulated ranks, and the messages between them |
| ``training.py`` | one training run |
| ``sweep.py`` | which runs to make; the file that keeps them |
| ``report.py`` | table and pictures from the records |
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tagc.plots import pyplot

from ..machine import machine
from .methods import METHODS, QUICK
from .report import plots, table
from .sweep import Results, Sweep, make
from .training import Shape

__all__ = ["about", "add_arguments", "plots", "run", "table"]

about = "validation loss by codec and feedback, on simulated ranks in one process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--quick", action="store_true", help="3 methods, 100 steps, one seed: minutes")
    add("--methods", help="names from benchmarks/convergence/methods.py, separated by ';'")
    add("--steps", type=int, nargs="+", default=[450, 1500], help="lengths of training")
    add("--seeds", type=int, default=3, help="the first sweeps the rates, others use the best")
    add("--ranks", type=int, default=4, help="simulated ranks")
    add("--batch", type=int, default=8, help="sequences per rank and step")
    add("--context", type=int, default=64, help="bytes per sequence")
    add("--width", type=int, default=128, help="of the model, a multiple of 32")
    add("--layers", type=int, default=4, help="of the model")
    add("--momentum", type=float, nargs="+", default=[0.9], help="first momenta of AdamW")
    add("--max-rates", type=int, default=6, help="learning rates of a method at most")
    add("--jobs", type=int, default=1, help="runs at a time, each in a process and one thread")
    add("--device", help="default: CUDA where there is one, else the CPU")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        default=Path("runs/convergence.jsonl"),
        help="results, a line each; runs that are in it are not made again (default: %(default)s)",
    )
    add("--plots", type=Path, metavar="DIR", help="write PNG files there")


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, print the table."""
    if args.plots:
        pyplot()  # before hours of work, not after
    names = list(METHODS)
    if args.quick:
        args.steps, args.seeds, args.max_rates, names = [100], 1, 3, list(QUICK)
    if args.methods:
        names = [name.strip() for name in args.methods.split(";")]
    unknown = [name for name in names if name not in METHODS]
    wrong = []
    if unknown:
        wrong.append(f"unknown methods {unknown}; there are: {'; '.join(METHODS)}")
    if args.width % 32:
        wrong.append(f"--width {args.width}: not a multiple of 32")
    if not all(0 <= b < 1 for b in args.momentum):
        wrong.append(f"--momentum {args.momentum}: not in [0, 1)")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    # Methods without a first momentum are the same at each.
    methods = {m.name: m for b in args.momentum for m in (METHODS[n].at(b) for n in names)}
    shape = Shape(
        width=args.width,
        heads=args.width // 32,
        layers=args.layers,
        context=args.context,
        ranks=args.ranks,
        batch=args.batch,
    )
    sweep = Sweep(
        methods=list(methods.values()),
        shape=shape,
        steps=args.steps,
        seeds=args.seeds,
        max_rates=args.max_rates,
    )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    results = Results(args.json, {"suite": "convergence"} | machine(device))
    try:
        make(
            sweep,
            results,
            jobs=args.jobs,
            device=device,
            show=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
    made = (r for r in results.records if r["run"]["steps"] in args.steps)
    wanted = [r for r in made if r["method"] in methods]
    if not wanted:
        return 130
    print("\n" + table(wanted))
    if args.plots:
        for file in plots(wanted, args.plots):
            print(f"wrote {file}")
    return 0
