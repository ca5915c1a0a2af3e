"""``counts``: what the Triton kernels execute and move, counted from machine code, without a GPU.

An operator's launchers run on tensors of ``2**28`` elements that take no memory (:mod:`.work`),
with a driver that compiles and launches nothing. What a launch executes is its machine code
(:mod:`.sass`) times how often each statement is executed (:mod:`.follow`); what it moves is what
its statements access. Both, at the rates of a GPU (:mod:`.machines`), give the least time
(:mod:`.estimate`), and the share of a copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from ..options import add_outputs
from ..records import Record, append, read
from .compare import all_worse
from .table import table

__all__ = ["about", "add_arguments", "run", "table"]

about = "instructions and bytes of the GPU kernels, counted from compiled code; needs no GPU"
# The record that the tests compare with.
RECORD = Path(__file__).resolve().parents[1] / "results" / "kernel-counts.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--quick", action="store_true", help="one case of each operator, for H100")
    parser.add_argument(
        "--machine", action="append", default=[], choices=("A100", "H100", "B200"),
        help="GPU to estimate for; may be repeated (default: all three)",
    )  # fmt: skip
    parser.add_argument(
        "--filter", action="append", default=[], metavar="GLOB",
        help="only cases whose name this matches, such as 'unpack*'; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="store_true", help=f"write benchmarks/results/{RECORD.name} anew"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the record, and exit with 1 if anything grew",
    )
    add_outputs(parser, plots=False)


def run(args: argparse.Namespace) -> int:
    """Count, print the table."""
    if importlib.util.find_spec("triton") is None:
        print("no Triton here: it is for Linux on x86-64", file=sys.stderr)
        return 2
    from .count import count
    from .machines import MACHINES
    from .variants import quick, variants

    globs = args.filter or [""]
    every = [w for w in variants() if any(fnmatch(w.name, f"{glob}*") for glob in globs)]
    few = [w for w in quick() if w in every]
    machines = args.machine or (["H100"] if args.quick else list(MACHINES))
    # All variants on the one in the middle.
    wanted = {m: every if m == "H100" and not args.quick else few for m in machines}
    if not any(wanted.values()):
        print("no case matches", file=sys.stderr)
        return 1
    results: list[Record] = []
    for name, works in wanted.items():
        for work in works:
            began = time.monotonic()
            results.append(count(work, MACHINES[name]))
            if args.json:
                append(args.json, results[-1])
            took = time.monotonic() - began
            print(f"{name} {work.name}: {took:.1f} s", file=sys.stderr, flush=True)
    if not (args.filter or args.quick or args.machine):
        results += (steps := _steps())
        for result in steps if args.json else ():
            append(args.json, result)
    grown = all_worse(results, read([RECORD])) if args.check else []
    if args.record:
        RECORD.unlink(missing_ok=True)
        for result in results:
            append(RECORD, result)
    print(table(results))
    for line in grown:
        print(f"grew: {line}")
    return 1 if grown else 0


def _steps() -> list[Record]:
    import tagc

    from .steps import count_step

    # What `auto` becomes, the others are.
    return [count_step(policy) for policy in tagc.policies() if policy not in ("auto", "dense")]
