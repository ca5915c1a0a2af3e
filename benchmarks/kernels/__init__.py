"""``kernels``: operators of the codecs beside a reference and a plain copy.

Everything on one input, in one run, in turns: ours (numba on a CPU, Triton on CUDA), the eager
reference, and a clone of the gradient. The yardstick is a copy that moves as many bytes as the
operator must.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..records import Record, add_outputs, machine, measured
from .cases import select
from .clocks import clock_for
from .measure import measure
from .report import plots, table

__all__ = ["about", "add_arguments", "plots", "run", "table"]

about = "speed of every operator beside its reference and a copy, on a CPU or a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--quick", action="store_true", help="few and small cases, about a minute")
    add("--filter", action="append", default=[], metavar="GLOB",
        help="only cases whose name this matches, such as 'encode/2^22*int8x4'; may be repeated",
    )  # fmt: skip
    add("--sizes", nargs="+", type=int, metavar="LOG2",
        help="sizes to measure instead: 22 for 2^22 elements",
    )  # fmt: skip
    add("--list", action="store_true", help="print the names of the cases and exit")
    add("--time-limit", type=float, default=float("inf"), metavar="SECONDS",
        help="start no further case after this many seconds",
    )  # fmt: skip
    add_outputs(parser)


def run(args: argparse.Namespace) -> list[Record] | int:
    """Measure."""
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here")
    cases = select(device.type, args.filter, args.sizes, quick=args.quick)
    if args.list or not cases:
        print("\n".join(case.name for case in cases) or "no case matches", flush=True)
        return 0 if cases else 1
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(args, cases, device)
    finally:
        torch.set_num_threads(threads)


def _measured(args: argparse.Namespace, cases: list, device: torch.device) -> list[Record]:
    # Turns on a GPU are short; the host's first ones, which compile, do not count.
    budget = 0.25 if args.quick or device.type == "cuda" else 1.0
    clock, started = clock_for(device), time.monotonic()

    def runs() -> Iterator[tuple[str, Callable[[], Record]]]:
        for done, case in enumerate(cases):
            if time.monotonic() - started > args.time_limit:
                print(f"time limit: {len(cases) - done} cases not measured", file=sys.stderr)
                return
            yield case.name, partial(measure, case, device, clock, budget=budget)
            if device.type == "cuda":
                # So that a case does not depend on those before it.
                importlib.import_module("tagc.triton_kernels.scratch").release()

    command = f"python -m benchmarks kernels {shlex.join(_words(args, device))}"
    about = {"suite": "kernels", "timing": clock.about, "command": command}
    return measured("case", runs(), about | machine(device), args.json)


def _words(args: argparse.Namespace, device: torch.device) -> list[str]:
    """What repeats this, without the files that it writes."""
    words = ["--device", device.type]
    words += ["--quick"] if args.quick else []
    words += ["--sizes", *map(str, args.sizes)] if args.sizes else []
    return words + [word for pattern in args.filter for word in ("--filter", pattern)]
