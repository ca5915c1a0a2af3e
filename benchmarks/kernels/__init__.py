"""``kernels``: operators of the codecs beside a reference and a plain copy.

Everything on one input, in one run, in turns: ours (numba on a CPU, Triton on CUDA) and the eager
reference. The yardstick is a copy that moves as many bytes as the operator must.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..records import Record, add_output, machine, markdown, measured
from .measure import OURS, CudaClock, HostClock, measure
from .operators import select

about = "speed of every operator beside its reference and a copy, on a CPU or a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--quick", action="store_true", help="few and small cases, about a minute")
    add("--filter", default="*", metavar="GLOB", help="cases by name, such as 'encode/2^22*int8x4'")
    add("--sizes", nargs="+", type=int, metavar="LOG2", help="22 for 2^22 elements, and so on")
    add("--list", action="store_true", help="print the names of the cases and exit")
    add("--time-limit", type=float, default=math.inf, help="seconds; then no further case starts")
    add_output(parser)


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
    torch.set_num_threads(1)
    # Turns on a GPU are short; the host's first ones, which compile, do not count.
    budget = 0.25 if args.quick or device.type == "cuda" else 1.0
    clock = CudaClock(device) if device.type == "cuda" else HostClock()
    started = time.monotonic()

    def runs() -> Iterator[tuple[str, Callable[[], Record]]]:
        for done, case in enumerate(cases):
            if time.monotonic() - started > args.time_limit:
                print(f"time limit: {len(cases) - done} cases not measured", file=sys.stderr)
                return
            yield case.name, partial(measure, case, device, clock, budget=budget)
            if device.type == "cuda":
                # So that a case does not depend on those before it.
                importlib.import_module("tagc.triton_kernels.scratch").release()

    about = {"suite": "kernels", "timing": clock.about}
    return measured("case", runs(), about | machine(device), args.json)


def table(results: Sequence[Record]) -> str:
    """A row per case: ours, its share of the copy bandwidth, and the others beside it.

    Beside each other contender's time stands how many times faster ours is, unless a record says
    that the other's results were wrong.
    """
    failed = [f"{r['case']} failed: {r['failed']}" for r in results if "failed" in r]
    measured = [r for r in results if "failed" not in r]
    others = [n for n in dict.fromkeys(n for r in measured for n in r["contenders"]) if n != OURS]

    def other(record: Record, name: str) -> str:
        result = record["contenders"].get(name)
        if result is None:
            return "-"
        speedup = record["speedup"].get(name)
        return f"{result['ms']:.3g} ms, {'wrong' if speedup is None else f'{speedup:.3g}×'}"

    rows = []
    for r in measured:
        mine = r["contenders"][OURS]
        ours = f"{mine['ms']:.3g} ms"
        # On a GPU the host's part is a matter of its own: launches.
        if r.get("device") == "cuda":
            ours += f" (host {mine['host_ms']:.3g} ms)"
        floor, copy = f"{r['floor_bytes'] / 1e6:.1f} MB", f"{r['copy_gb_per_s']:.1f} GB/s"
        share, each = f"{mine['fraction']:.2f}", f"{1e6 * mine['ms'] / r['numel']:.2f}"
        rows.append([r["case"], floor, copy, ours, each, share, *(other(r, n) for n in others)])
    to_others = (f"{name}; speed of {OURS} to it" for name in others)
    head = ["case", "floor", "copy", OURS, "ns an element", "of copy", *to_others]
    shown = ("date", "gpu", "processor", "device", "threads", "load", "timing", "torch", "triton")
    machine = ", ".join(f"{key} {results[0][key]}" for key in shown if key in results[0])
    return "\n\n".join([machine, markdown(head, rows), "  \n".join(failed)]).strip()
