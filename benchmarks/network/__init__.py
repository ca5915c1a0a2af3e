"""Training over a slow network: ``python -m benchmarks network``; needs root, ``ip`` and ``tc``.

| file | idea |
|---|---|
| ``namespaces.py`` | the network: a namespace and a rate for each host |
| ``methods.py``, ``baselines.py`` | what is compared; how the dense ones communicate |
| ``training.py``, ``ledger.py`` | one rank's training; its collectives, counted |
| ``worker.py``, ``ranks.py`` | a rank's process; all of them from outside |
| ``cells.py`` | which cells to measure, and the file that keeps them |
| ``report.py``, ``plots.py`` | tables and pictures from that file alone |
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

about = "real FSDP training steps over rate-limited links: time, bytes and loss of each method"

_RATES = "unlimited,10gbit,1gbit,200mbit,100mbit"
_QUICK: dict[str, Any] = {
    "ranks": "2",
    "rates": "unlimited,200mbit",
    "width": 160,
    "layers": 4,
    "loss_steps": 50,
    "steps": 6,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--report", type=Path, metavar="FILE", help="measure nothing, draw the report of FILE")
    add("--out", type=Path, default=Path("runs/network"), help="folder for results and report")
    add("--quick", action="store_true", help="2 ranks, 2 rates, 3 methods, a small model")
    add("--ranks", default="2,4", help="world sizes (default: %(default)s)")
    add(
        "--ranks-per-host",
        type=int,
        default=1,
        help="that share a host and its link; tagc and forms by messages then work in two levels",
    )
    add("--rates", default=_RATES, help="what a host may send (default: %(default)s)")
    add(
        "--methods",
        help="names from benchmarks/network/methods.py, POLICY or POLICY@bf16 (parameters travel "
        "in bf16); +NAME,... adds to the default, all of them and the built-in policies",
    )
    add("--steps", type=int, default=8, help="timed steps of a cell at most")
    add("--cell-seconds", type=float, default=15, help="and how long they may take (3 at least)")
    add("--loss-steps", type=int, default=100, help="length of the loss curve; 0: none")
    add("--loss-ranks", help="world sizes of the loss curve (default: the first of --ranks)")
    add("--passes", type=int, default=1, help="measure so often, in alternating order")
    add("--budget", type=float, default=50, help="minutes; begin no cell that would exceed them")
    add("--width", type=int, default=320, help="of the model (default: %(default)s)")
    add("--layers", type=int, default=8, help="of the model (default: %(default)s)")
    add("--batch", type=int, default=1, help="sequences of 128 bytes per rank and micro-batch")
    add("--micro-batches", type=int, default=1, help="backwards for each step of the optimizer")
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add(
        "--keep-gathered",
        action="store_true",
        help="reshard_after_forward=False: parameters are gathered once a step (ZeRO-2)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and draw the report; 2 if that is impossible here."""
    # Here and not above, since the workers import this package and count collectives from the
    # first import on.
    from benchmarks.network import report
    from benchmarks.network.cells import OutOfBudget, ResultsFile, measure
    from benchmarks.network.namespaces import NetworkUnavailable, check_requirements
    from benchmarks.network.ranks import RanksError

    if args.report:
        try:
            print(report.write(args.report, args.report.parent))
        except (OSError, ValueError) as error:
            print(f"benchmarks network: {error}", file=sys.stderr)
            return 2
        return 0
    file = args.out / "results.jsonl"
    status = 0
    try:
        check_requirements()
        options = _options(args)
        results = ResultsFile(file, _facts(args))
        # As for Ctrl-C: leave through the contexts, which remove processes and namespaces.
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            measure(options, results, lambda text: print(text, flush=True))
        finally:
            signal.signal(signal.SIGTERM, before)
    except OutOfBudget:
        print(f"The {args.budget:g} minutes are spent; the same command measures what is left.")
    except (NetworkUnavailable, RanksError, ValueError) as error:
        print(f"benchmarks network: {error}", file=sys.stderr)
        status = 2
    if file.exists() and file.stat().st_size:
        print("\n" + report.write(file, args.out))
    return status


def _options(args: argparse.Namespace) -> Any:
    from benchmarks.network.cells import UNLIMITED, Options
    from benchmarks.network.methods import QUICK, default_methods, resolve_all
    from benchmarks.network.namespaces import Rate
    from benchmarks.network.training import Settings

    if args.quick:
        vars(args).update(_QUICK)
    names = list(QUICK) if args.quick else default_methods()
    if args.methods and args.methods.startswith("+"):
        names += args.methods[1:].split(",")
    elif args.methods:
        names = args.methods.split(",")
    ranks = _numbers(args.ranks)
    if min(ranks) < 2:
        raise ValueError(f"--ranks {args.ranks}: one rank alone sends nothing")
    if any(n % args.ranks_per_host or n == args.ranks_per_host for n in ranks):
        raise ValueError(
            f"--ranks {args.ranks}: not several hosts of --ranks-per-host {args.ranks_per_host}"
        )
    if args.micro_batches < 1:
        raise ValueError(f"--micro-batches {args.micro_batches}: a step has at least one")
    rates = [Rate.parse(text) for text in args.rates.split(",")]
    loss_ranks = _numbers(args.loss_ranks) if args.loss_ranks else ranks[:1]
    return Options(
        ranks=ranks,
        # The unlimited steps tell compute from communication, and how long the others will take.
        rates=(UNLIMITED, *(rate for rate in rates if rate != UNLIMITED)),
        methods=tuple(resolve_all(names)),
        settings=Settings(
            width=args.width,
            layers=args.layers,
            batch=args.batch,
            micro_batches=args.micro_batches,
            lr=args.lr,
            loss_steps=args.loss_steps,
            reshard=not args.keep_gathered,
        ),
        ranks_per_host=args.ranks_per_host,
        steps=args.steps,
        cell_seconds=args.cell_seconds,
        loss_ranks=loss_ranks if args.loss_steps else (),
        passes=args.passes,
        budget=60 * args.budget,
    )


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    import os
    import platform

    from benchmarks.machine import machine

    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    # What the command line's parser adds for itself is no option.
    options = {k: v for k, v in options.items() if isinstance(v, str | int | float | None)}
    return {
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
        "options": options,
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
