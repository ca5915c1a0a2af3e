"""``quality``: the loss of training with compressed traffic, on real ranks.

Comparisons of losses share one training loop. All but ``gpu`` run on CPUs, over gloo. In ``sweep``
no method is compared at another's learning rate. The two runs of a pair share data, order and
initialization, so their difference says more than their losses. ``exact`` counts bits instead.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import tagc
from tagc.basics.quantities import count
from tagc.policy.policy import data_parallel_policies

from ..gloo import on_ranks
from ..records import Record, add_output
from . import exact, pretrained
from .methods import DENSE, LINES, METHODS, QUICK, Method, method_of
from .report import table
from .runs import Comparison, listed_runs, make, on_gpu, paired_runs, results_of, sweep_runs
from .settings import NANO, NANO_RECIPE, SETTINGS, SMALL, Run, Shape

__all__ = ["about", "add_arguments", "run", "table"]

about = "training loss with each codec, feedback and policy, on real ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    comparisons = parser.add_subparsers(dest="comparison", required=True, metavar="COMPARISON")

    sweep = comparisons.add_parser("sweep", help="each method at its best learning rate")
    add = sweep.add_argument
    add("--quick", action="store_true", help="3 methods, 2 ranks, a small model, 100 steps")

    paired = comparisons.add_parser("paired", help="seed by seed, at dense's best rate")
    add = paired.add_argument
    add("--settings", help=f"separated by ';', from: {'; '.join(SETTINGS)}")
    add("--lines",
        help="separated by ';': policies, 'sites, every 32, 4 bits', or: "
        f"{'; '.join(LINES)}; default: each setting's own",
    )  # fmt: skip
    add("--rates-not-kept", action="store_true", help="train without keep_rates")
    add("--pairs", type=count, nargs=2, default=(3, 8), help="fewest, most seeds of a line (3 8)")

    untuned = comparisons.add_parser("untuned", help="policies at dense's own settings")
    add = untuned.add_argument
    add("--tuned", action="store_true", help="apply the factors that a policy names")

    tuned = comparisons.add_parser("pretrained", help="all-MiniLM-L6-v2, fine-tuned to retrieve")
    add = tuned.add_argument
    add("--lines", default=";".join(pretrained.LINES), help="separated by ';' (%(default)s)")
    add("--seeds", type=count, default=3, help="runs of each line (default: %(default)s)")
    add("--steps", type=count, default=30, help="of each run (default: %(default)s)")
    add("--rehearse", action="store_true", help="2 ranks, a tiny model of random weights")

    shared = comparisons.add_parser("gpu", help="100 M parameters on ranks that share a GPU")
    add = shared.add_argument
    add("--text", type=Path, help="made by benchmarks.tokens; default: Python's library")
    add("--steps", type=count, default=520, help="of each line; 7 minutes of an H100's in all")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses a tiny model")

    bits = comparisons.add_parser("exact", help="bits that codec exact sends at several rates")
    bits.add_argument("--steps", type=count, default=200, help="of each run (%(default)s)")
    for comparison in (sweep, paired, untuned, tuned, shared, bits):
        add_output(comparison, "runs/quality.jsonl")


def run(args: argparse.Namespace) -> list[Record]:
    """Make the runs that are missing."""
    try:
        if args.comparison == "gpu":
            on_gpu(args)
        elif args.comparison == "exact":
            results = results_of("exact", args.json)
            on_ranks(exact.measure, exact.SHAPE.ranks, args.steps, results)
        elif args.comparison == "pretrained":
            runs = partial(listed_runs, runs=pretrained.runs(args))
            make(args.comparison, runs, args.json, pretrained.fine_tune)
        else:
            kinds = {"sweep": _sweep, "paired": _paired, "untuned": _untuned}
            make(args.comparison, kinds[args.comparison](args), args.json)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
    return results_of(args.comparison, args.json).records


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(";")] if text else []


def _sweep(args: argparse.Namespace) -> Comparison:
    if args.quick:
        shape = replace(SMALL, ranks=2)
        return partial(sweep_runs, methods=QUICK, shape=shape, steps=100, seeds=1, max_rates=3)
    return partial(sweep_runs, methods=METHODS, shape=Shape(), steps=1500, seeds=3)


def _paired(args: argparse.Namespace) -> Comparison:
    least, most = args.pairs
    if least > most:
        raise ValueError(f"--pairs {least} {most}: at least more than at most")
    names = _names(args.settings) or [*SETTINGS]
    if unknown := [name for name in names if name not in SETTINGS]:
        raise ValueError(f"unknown: {'; '.join(unknown)}; there are: {'; '.join(SETTINGS)}")
    lines = _names(args.lines)
    for line in lines:
        method_of(line)  # must be known
    return partial(
        paired_runs,
        settings=[SETTINGS[name] for name in names],
        lines=lines,
        kept=not args.rates_not_kept,
        seeds=(least, most),
    )


def _untuned(args: argparse.Namespace) -> Comparison:
    # These runs are in fp32, whose parameters `exact` refuses.
    names = [name for name in data_parallel_policies() if name not in (DENSE.name, "exact")]
    methods = [method_of(name) for name in (DENSE.name, *names)]
    runs = [_untuned_run(m, seed, tuned=args.tuned) for seed in range(3) for m in methods]
    return partial(listed_runs, runs=runs)


def _untuned_run(method: Method, seed: int, *, tuned: bool) -> Run:
    tuning = tagc.Policy.load(method.name).tuning if tuned else None
    rate, norm = (tuning.rate_factor, tuning.norm_factor or 1.0) if tuning else (1.0, 1.0)
    recipe = replace(NANO_RECIPE, clip=norm)
    return Run(method=method, shape=NANO, recipe=recipe, steps=150, rate=1e-3 * rate, seed=seed)
