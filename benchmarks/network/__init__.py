"""``network``: training over slow links; needs Linux, root, ``ip`` and ``tc``.

| file | idea |
|---|---|
| ``namespaces.py``, ``latency.py`` | the network: a namespace and a rate for each host; latency |
| ``methods.py``, ``baselines.py`` | what is compared; how the dense ones communicate |
| ``training.py``, ``ledger.py`` | one rank's training; its collectives, counted |
| ``worker.py``, ``ranks.py`` | a rank's process; all of them from outside |
| ``cells.py`` | which cells to measure, and the file that keeps them |
| ``results.py``, ``predicted.py``, ``report.py`` | tables and a plot from that file alone |
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tagc.basics.quantities import seconds

from ..options import add_outputs
from ..records import Record

about = "time and bytes of FSDP training steps over rate-limited links; needs root"

_RATES = "unlimited,10gbit,1gbit,200mbit,100mbit"
_QUICK: dict[str, Any] = {"ranks": "2", "rates": "unlimited,200mbit", "steps": 6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--quick", action="store_true", help="2 ranks, 2 rates, 3 methods, a small model")
    add("--ranks", default="2,4", help="world sizes (default: %(default)s)")
    add("--ranks-per-host", type=int, default=1,
        help="ranks that share a host and its link; all methods then work in two levels",
    )  # fmt: skip
    add("--rates", default=_RATES, help="what a host may send (default: %(default)s)")
    add("--latency", type=seconds, default=0.0,
        help="what a packet takes from one host to another, such as 50ms (default: nothing)",
    )  # fmt: skip
    add(
        "--methods",
        help="names from benchmarks/network/methods.py, POLICY or POLICY@bf16 (parameters travel "
        "in bf16); default: all of them but sites, and some built-in policies",
    )
    add("--steps", type=int, default=8, help="timed steps of a cell, at most")
    add("--step-time", type=seconds,
        help="how long a step of a site takes, such as 250ms, as if a device computed it and left "
        "the cores idle (default: it is computed here)",
    )  # fmt: skip
    add("--micro-batches", type=int, default=1, help="backward passes per optimizer step")
    add_outputs(parser, "runs/network.jsonl")


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and print the tables; 2 if that is impossible here."""
    from .cells import ResultsFile, measure
    from .namespaces import NetworkUnavailable, check_requirements
    from .ranks import RanksError

    try:
        check_requirements()
        options = _options(args)
        results = ResultsFile(args.json, _facts())
        # As for Ctrl-C: leave through the contexts, which remove processes and namespaces.
        before = signal.signal(signal.SIGTERM, _terminate)
        try:
            measure(options, results, lambda text: print(text, file=sys.stderr, flush=True))
        finally:
            signal.signal(signal.SIGTERM, before)
    except (NetworkUnavailable, RanksError, ValueError) as error:
        print(f"benchmarks network: {error}", file=sys.stderr)
        return 2
    print(table(results.cells))
    if args.plots:
        for file in plots(results.cells, args.plots):
            print(f"wrote {file}")
    return 0


# The workers import this package and must count collectives before anything binds them, so what
# imports tagc is imported late.
def table(cells: Sequence[Record]) -> str:
    """The report, as Markdown."""
    from . import report

    return report.table(cells)


def plots(cells: Sequence[Record], folder: Path) -> list[Path]:
    """Step time by bandwidth."""
    from . import report

    return report.plots(cells, folder)


def _options(args: argparse.Namespace) -> Any:
    from .cells import UNLIMITED, Options
    from .methods import QUICK, default_methods, resolve_all
    from .namespaces import Rate
    from .training import Settings

    if args.quick:
        vars(args).update(_QUICK)
    names = list(QUICK) if args.quick else default_methods()
    if args.methods:
        names = args.methods.split(",")
    ranks = tuple(int(part) for part in args.ranks.split(","))
    if min(ranks) < 2:
        raise ValueError(f"--ranks {args.ranks}: one rank alone sends nothing")
    if any(n % args.ranks_per_host or n == args.ranks_per_host for n in ranks):
        raise ValueError(
            f"--ranks {args.ranks}: not several hosts of --ranks-per-host {args.ranks_per_host}"
        )
    if args.micro_batches < 1:
        raise ValueError(f"--micro-batches {args.micro_batches}: a step has at least one")
    rates = [Rate.parse(text) for text in args.rates.split(",")]
    size = {"width": 160, "layers": 4} if args.quick else {}
    return Options(
        ranks=ranks,
        # The unlimited steps tell compute from communication, and how long the others will take.
        rates=(UNLIMITED, *(rate for rate in rates if rate != UNLIMITED)),
        methods=tuple(resolve_all(names)),
        settings=Settings(**size, micro_batches=args.micro_batches),
        ranks_per_host=args.ranks_per_host,
        latency=args.latency,
        steps=args.steps,
        step_time=args.step_time,
    )


def _facts() -> dict[str, Any]:
    import os
    import platform

    from ..machine import machine

    return {
        "suite": "network",
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
    }


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
