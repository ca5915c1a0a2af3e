"""The command ``network``."""

from __future__ import annotations

import argparse
import signal
import sys

from tagc.basics.quantities import count, seconds

from ..records import Record, Results, add_output
from . import worker
from .launch import UNLIMITED, Network, check_requirements, rates
from .methods import DEFAULT, Settings, keys, resolve
from .report import plot, table

__all__ = ["about", "add_arguments", "plot", "run", "table"]

about = "time and bytes of FSDP training steps over rate-limited links; needs root"

_RATES = "unlimited,10gbit,1gbit,200mbit,100mbit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--ranks", default="2,4", help="world sizes (default: %(default)s)")
    add("--ranks-per-host", type=count, default=1, help="ranks that share a host and its link")
    add("--rates", type=rates, default=_RATES, help="what a host may send (default: %(default)s)")
    add("--latency", type=seconds, default=0.0, help="of a packet between hosts, such as 50ms")
    add("--methods",
        help="names from benchmarks/network/methods.py, POLICY, POLICY@bf16 (parameters travel in "
        "bf16) or POLICY@ddp; default: all names but sites, and some built-in policies",
    )  # fmt: skip
    add("--steps", type=count, default=8, help="timed steps of a cell, at most")
    add("--step-time", type=seconds, help="a site's step only waits for so long, such as 250ms")
    add("--micro-batches", type=count, default=1, help="backward passes per optimizer step")
    add_output(parser, "runs/network.jsonl")


def run(args: argparse.Namespace) -> list[Record]:
    """Measure what is missing."""
    check_requirements()
    check(args)
    args.command = f"python -m benchmarks {' '.join(sys.argv[1:])}"
    # As for Ctrl-C: leave through the contexts, which remove processes and namespaces.
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    try:
        for ranks in args.ranks:
            measure(args, ranks)
    finally:
        signal.signal(signal.SIGTERM, before)
    return Results(args.json, "key", {"suite": "network"}).records


def measure(args: argparse.Namespace, ranks: int) -> None:
    """Measure the cells that the file does not have with so many ranks."""
    results = Results(args.json, "key", {"suite": "network"})
    if any(results.get(key) is None for key, _ in keys(args, ranks)):
        with Network(ranks, args.ranks_per_host, latency=args.latency) as network:
            network.on_ranks(worker.measure, args)


def check(args: argparse.Namespace) -> None:
    """Turn the options' texts into what they mean.

    Raises:
        ValueError: if they mean nothing.
    """
    names = args.methods.split(",") if args.methods else DEFAULT
    ranks = tuple(int(part) for part in args.ranks.split(","))
    if min(ranks) < 2:
        raise ValueError(f"--ranks {args.ranks}: one rank alone sends nothing")
    each = args.ranks_per_host
    if any(n % each or n == each for n in ranks):
        raise ValueError(f"--ranks {args.ranks}: not several hosts of --ranks-per-host {each}")
    args.ranks = ranks
    # The unlimited steps tell compute from communication, and how long the others will take.
    args.rates = tuple(dict.fromkeys((UNLIMITED, *args.rates)))
    args.methods = tuple(resolve(name) for name in dict.fromkeys(names))
    args.settings = Settings(micro_batches=args.micro_batches)
