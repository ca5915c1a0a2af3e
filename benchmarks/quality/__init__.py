"""``quality``: the loss of training with compressed traffic, on real ranks.

Four comparisons, which share one training loop; the first three run on CPUs, over gloo:

* ``sweep``: loss against bits. Each method's learning rate is swept, and none is compared at
  another's.
* ``paired``: at dense's best rate, seed by seed. The two runs of a pair share data, order and
  initialization, so their difference says more than their losses.
* ``untuned``: the shipped policies at dense's own settings: what happens on the first try.
* ``gpu``: a larger model on ranks that share a GPU, as many steps as the time allows.

| file | idea |
|---|---|
| ``methods.py``, ``settings.py`` | what is compared; model, recipe and settings |
| ``training.py``, ``optimizers.py`` | one run, as each of its ranks does it |
| ``runs.py`` | which runs to make, and the file that keeps them |
| ``gpu.py`` | the comparison ``gpu`` |
| ``report.py``, ``intervals.py`` | tables and plots from the records alone |
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import tagc

from ..machine import machine
from ..options import add_outputs
from . import gpu
from .methods import LINES, METHODS, QUICK, Method
from .report import plots, table
from .runs import Comparison, Listed, Pairs, Results, Sweep, make
from .settings import NANO, NANO_RECIPE, SETTINGS, Run, Shape

__all__ = ["about", "add_arguments", "plots", "run", "table"]

about = "training loss with each codec, feedback and policy, on real ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    comparisons = parser.add_subparsers(dest="comparison", required=True, metavar="COMPARISON")
    _sweep_arguments(comparisons.add_parser("sweep", help="each method at its best learning rate"))
    _paired_arguments(comparisons.add_parser("paired", help="seed by seed, at dense's best rate"))
    _untuned_arguments(comparisons.add_parser("untuned", help="policies at dense's own settings"))
    shared = comparisons.add_parser("gpu", help="100 M parameters on ranks that share a GPU")
    gpu.add_arguments(shared)
    add_outputs(shared, "runs/quality.jsonl", plots=False)


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="3 methods, 2 ranks, a small model, 100 steps")
    add("--methods", help="names from benchmarks/quality/methods.py, separated by ';'")
    add("--steps", type=int, nargs="+", default=[1500], help="lengths of training in steps")
    add("--seeds", type=int, default=3, help="the first sweeps the rates, others use the best")
    add("--width", type=int, default=128, help="width of the model, a multiple of 32")
    add("--layers", type=int, default=4, help="layers of the model")
    add("--max-rates", type=int, default=6, help="try at most this many rates for a method")
    add_outputs(parser, "runs/quality.jsonl")


def _paired_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--settings", help=f"separated by ';', from: {'; '.join(SETTINGS)}")
    add("--lines", help=f"separated by ';', from: {'; '.join(LINES)}")
    add("--rates-not-kept", action="store_true", help="train without keep_rates")
    add_outputs(parser, "runs/quality.jsonl", plots=False)


def _untuned_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policies", default=",".join(tagc.policies()), help="names or files, with commas")
    add("--seeds", type=int, default=3, help="runs of each policy (default: %(default)s)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tuned", action="store_true", help="apply the factors that a policy names")
    how.add_argument("--kept", action="store_true", help="let tagc keep rate and limit")
    add_outputs(parser, "runs/quality.jsonl", plots=False)


def run(args: argparse.Namespace) -> int:
    """Make the runs that are missing, print the table."""
    try:
        if args.comparison == "gpu":
            print("\n" + table(gpu.run(args)))
            return 0
        comparison = _COMPARISONS[args.comparison](args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    facts = {"suite": "quality", "comparison": args.comparison} | machine()
    try:
        make(comparison, args.json, facts)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
    records = Results(args.json, facts).records
    if not records:
        return 130
    print("\n" + table(records))
    if getattr(args, "plots", None):
        for file in plots(records, args.plots):
            print(f"wrote {file}")
    return 0


def _chosen(asked: str | None, known: dict, default: tuple[str, ...] = ()) -> list[str]:
    """Names in a list separated by ``;``; all without one.

    Raises:
        ValueError: for a name that is not known.
    """
    names = [name.strip() for name in asked.split(";")] if asked else list(default or known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown: {'; '.join(unknown)}; there are: {'; '.join(known)}")
    return names


def _sweep(args: argparse.Namespace) -> Comparison:
    if args.quick:
        args.steps, args.seeds, args.max_rates = [100], 1, 3
        args.width, args.layers = 64, 2
    names = _chosen(args.methods, METHODS, QUICK if args.quick else ())
    if args.width % 32:
        raise ValueError(f"--width {args.width}: not a multiple of 32")
    return Sweep(
        methods=[METHODS[name] for name in names],
        shape=Shape(
            width=args.width,
            heads=args.width // 32,
            layers=args.layers,
            ranks=2 if args.quick else 4,
        ),
        steps=args.steps,
        seeds=args.seeds,
        max_rates=args.max_rates,
    )


def _paired(args: argparse.Namespace) -> Comparison:
    return Pairs(
        settings=[SETTINGS[name] for name in _chosen(args.settings, SETTINGS)],
        lines=_chosen(args.lines, LINES),
        kept=not args.rates_not_kept,
    )


def _untuned(args: argparse.Namespace) -> Comparison:
    names = dict.fromkeys(["dense", *args.policies.split(",")])
    return Listed(runs=[_untuned_run(n, s, args) for s in range(args.seeds) for n in names])


def _untuned_run(policy: str, seed: int, args: argparse.Namespace) -> Run:
    tuning = tagc.Policy.load(policy).tuning if args.tuned else None
    rate, norm = (tuning.rate_factor, tuning.norm_factor or 1.0) if tuning else (1.0, 1.0)
    dense = policy == "dense"
    return Run(
        method=Method(name=policy, policy=None if dense else policy),
        shape=NANO,
        steps=150,
        rate=1e-3 * rate,
        seed=seed,
        recipe=replace(NANO_RECIPE, clip=norm, kept=args.kept and not dense),
    )


_COMPARISONS = {"sweep": _sweep, "paired": _paired, "untuned": _untuned}
