"""``counts``: what the Triton kernels execute and move, counted from machine code, without a GPU.

An operator's launchers run on tensors of ``2**28`` elements that take no memory, with a driver that
compiles and launches nothing (:mod:`.count`). What a launch executes is its machine code
(:mod:`.sass`) times how often each statement is executed (:mod:`.follow`); what it moves is what
its statements access. Both, at the rates of an H100 (:mod:`.h100`), give the least time
(:mod:`.estimate`), and the share of a copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from ..records import Record, append
from .table import table

__all__ = ["about", "add_arguments", "run", "table"]

about = "instructions and bytes of the GPU kernels, counted from compiled code; needs no GPU"
# The record that docs/kernels.md shows and the tests compare with.
RECORD = Path(__file__).resolve().parents[1] / "results" / "kernel-counts.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--op", help="count one operator, such as unpack, and no steps")
    which.add_argument("--record", action="store_true", help=f"write {RECORD.name} anew")


def run(args: argparse.Namespace) -> int:
    """Count, print the table."""
    if importlib.util.find_spec("triton") is None:
        print("no Triton here: it is for Linux on x86-64", file=sys.stderr)
        return 2
    from tagc.policy import data_parallel_policies

    from .cases import CASES
    from .count import count
    from .steps import count_step

    results: list[Record] = []
    for case in CASES:
        if args.op in (None, case.op):
            began = time.monotonic()
            results.append(count(case))
            took = time.monotonic() - began
            print(f"{case.name}: {took:.1f} s", file=sys.stderr, flush=True)
    if args.op is None:
        # What `auto` becomes, the others are.
        policies = [p for p in data_parallel_policies() if p not in ("auto", "dense")]
        results += map(count_step, policies)
    if args.record:
        RECORD.unlink(missing_ok=True)
        for result in results:
            append(RECORD, result)
    print(table(results))
    return 0
