"""``host``: what tagc takes of the host's time in a step, on a CPU, with kernels that do nothing.

Where a GPU waits for its host, a step takes the host's time. Here one rank of several takes the
steps of a small model of many units, as on NCCL. tagc's kernels are not started, so what is left is
Python, torch's dispatcher and torch's own small kernels. Machines differ, and so does one machine
from run to run, so the figure to compare is the share: time in tagc's collectives over the rest of
the same step, which is FSDP2's and the model's.

Kernels that do nothing write no lists, so policies that select have nothing to read here.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

import tagc
from tagc.attach.fsdp2_collectives import CustomAllGather, CustomReduceScatter
from tagc.collect import transport
from tagc.handle import collectives

from .machine import machine
from .options import add_outputs
from .rank import alone, sharded
from .records import Record, append, markdown

about = "the host's time of a step, with kernels that do nothing; needs no GPU"
_POLICIES = ("hybrid", "loco-4bit", "one-bit", "thrifty")
_LAYERS, _SETTLE = 32, 10
_CPU = torch.device("cpu")


class _Spent:
    """Seconds spent in what tagc puts in place of FSDP's collectives."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, original: Any) -> Any:
        def call(*args: Any, **how: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **how)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def measure(policy: str, steps: int) -> Record:
    """Medians of some steps of one of 8 ranks, 33 units."""
    from triton.runtime.jit import JITFunction

    ops = importlib.import_module("tagc.triton_kernels.ops")
    started, spent = 0, _Spent()

    def start_nothing(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        nonlocal started
        started += 1

    # A mock's own `return_value` would take as long as what is measured.
    def not_gloo(*_: Any) -> bool:
        return False

    def kernels(*_: Any) -> Any:
        return ops

    with alone(8), ExitStack() as stack:
        stack.enter_context(mock.patch.object(transport, "_is_gloo", not_gloo))
        stack.enter_context(mock.patch.object(JITFunction, "run", start_nothing))
        stack.enter_context(mock.patch.object(collectives, "get_ops", kernels))
        for kind in (CustomAllGather, CustomReduceScatter):
            timed = spent.timing(kind.__call__)
            stack.enter_context(mock.patch.object(kind, "__call__", timed))
        model = sharded(_CPU, layers=_LAYERS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such small units may send more when compressed
            tagc.wrap(model, policy, hosts=1)
        for reducer in tagc.compressor(model).reducers:
            reducer.counters.steps = reducer.plan.warmup_steps
        batch = torch.randint(256, (1, 8))
        ours, shares = [], []
        for step in range(_SETTLE + steps):
            if step == _SETTLE:
                started, ours, shares = 0, [], []
            spent.seconds, start = 0.0, time.perf_counter()
            model(batch).backward()
            model.zero_grad()
            rest = time.perf_counter() - start - spent.seconds
            ours.append(1e3 * spent.seconds)
            shares.append(spent.seconds / rest)
    low, _, high = statistics.quantiles(shares, n=4)
    return {
        "policy": policy,
        "tagc_ms": round(statistics.median(ours), 1),
        "share": round(statistics.median(shares), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "tagc_started": started // steps,
    }


def table(records: Sequence[Record]) -> str:
    """A row for each policy."""
    keys = ["policy", "tagc_ms", "share", "quartiles", "tagc_started"]
    return markdown(keys, ([r[key] for key in keys] for r in records))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    parser.add_argument("--steps", type=int, default=25, help="at least 2; default: %(default)s")
    parser.add_argument(
        "--policies", nargs="+", default=_POLICIES, metavar="POLICY",
        help="policies that do not select; default: %(default)s",
    )  # fmt: skip
    add_outputs(parser, plots=False)


def run(args: argparse.Namespace) -> int:
    """Measure the policies one after the other, on one thread."""
    if args.steps < 2:
        print("--steps: quartiles need at least 2", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    facts = {"suite": "host"} | machine(_CPU)
    records = []
    for policy in args.policies:
        records.append(facts | measure(policy, args.steps))
        print(f"{policy}: {records[-1]}", file=sys.stderr, flush=True)
        if args.json:
            append(args.json, records[-1])
    print(table(records))
    return 0
