"""``host``: what tagc takes of the host's time in a step, on a CPU, with kernels and collectives
that do nothing; and how many of its functions a reduction calls, in how many files.

Where a GPU waits for its host, a step takes the host's time. Here one rank of several takes the
steps of a small model of many units, as on NCCL. tagc's kernels are not started, and nothing is
sent. Of torch's kernels, those that move a whole unit run on one element, because the host of a GPU
does not wait for them. What is left is Python and torch's dispatcher. Machines differ, and so does
one machine from run to run, so the figure to compare is the share: time in tagc's collectives over
the rest of the same step, which is FSDP2's and the model's.

Kernels that do nothing write no lists, so policies that select have nothing to read here.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch

from tagc.attach.fsdp2_collectives import CustomAllGather, CustomReduceScatter
from tagc.collect import transport
from tagc.handle import collectives, wrapper
from tagc.ops.torch_operators import Copy, Subtract, copy_or_spoil, subtract_at_once

from .one_device import Idle, alone
from .rank import RANKS, sharded, wrap
from .records import Record, add_output, machine, markdown, measured

about = "the host's time of a step, with kernels that do nothing; needs no GPU"
_POLICIES = ("hybrid", "loco-4bit", "one-bit", "thrifty")
_LAYERS = 32
_SETTLE = 10  # steps that are not timed
_CPU = torch.device("cpu")


def measure(policy: str, steps: int) -> Record:
    """Medians of some steps of one of 8 ranks, 33 units."""
    from triton.runtime.jit import JITFunction

    ops = importlib.import_module("tagc.triton_kernels.ops")
    spent = 0.0  # seconds in tagc's collectives
    started = 0  # kernels
    called: list[str] = []  # the files of tagc's functions that the last reduction called
    reduce = CustomReduceScatter.__call__.__code__

    def timing(original: Any) -> Any:
        def call(*args: Any, **how: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return original(*args, **how)
            finally:
                spent += time.perf_counter() - start

        return call

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "/tagc/" in frame.f_code.co_filename:
            if frame.f_code is reduce:
                called.clear()
            called.append(frame.f_code.co_filename)

    def start_nothing(*args: Any, **options: Any) -> Any:
        nonlocal started
        started += 1
        return idle  # a compiled kernel, which starts nothing on any grid

    dtypes = torch.bfloat16, torch.float32, torch.bool
    one, other, flag = (torch.zeros(1, 1, dtype=dtype) for dtype in dtypes)

    idle = defaultdict(lambda: start_nothing)
    with alone(RANKS, Idle), ExitStack() as stack:
        # Functions: a mock's own `return_value` would take as long as what is measured.
        for place, name, instead in (
            (transport, "_is_gloo", lambda *_: False),
            (JITFunction, "run", start_nothing),
            (collectives, "get_ops", lambda *_: ops),
            (Copy, "run", lambda *_: copy_or_spoil(one, other, flag)),
            (Subtract, "run", lambda *_: subtract_at_once(one, one, other)),
            (wrapper, "with_kernels", lambda units, plan, ops: plan),  # such kernels give no result
            (CustomAllGather, "__call__", timing(CustomAllGather.__call__)),
            (CustomReduceScatter, "__call__", timing(CustomReduceScatter.__call__)),
        ):
            stack.enter_context(mock.patch.object(place, name, instead))
        model = sharded(_CPU, layers=_LAYERS)
        wrap(model, policy)
        batch = torch.randint(256, (1, 8))

        def step() -> tuple[float, float]:
            """Its seconds in tagc's collectives, and all others."""
            nonlocal spent
            spent = 0.0
            start = time.perf_counter()
            model(batch, batch).backward()
            model.zero_grad()
            return spent, time.perf_counter() - start - spent

        for _ in range(_SETTLE):
            step()
        sys.setprofile(note)
        step()
        sys.setprofile(None)
        started = 0
        timed = [step() for _ in range(steps)]
    low, middle, high = statistics.quantiles((ours / rest for ours, rest in timed), n=4)
    return {
        "tagc_ms": round(1e3 * statistics.median(ours for ours, _ in timed), 1),
        "share": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "tagc_started": started // steps,
        "calls, files": [len(called), len({*called})],
    }


def table(records: Sequence[Record]) -> str:
    """A row for each policy."""
    keys = ["policy", "tagc_ms", "share", "quartiles", "tagc_started", "calls, files"]
    return markdown(keys, ([r.get(key, "") for key in keys] for r in records))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this suite."""
    add = parser.add_argument
    add("--steps", type=int, default=25, help="at least 2; default: %(default)s")
    add("--policies", nargs="+", default=_POLICIES, help="ones that do not select (%(default)s)")
    add_output(parser)


def run(args: argparse.Namespace) -> list[Record]:
    """Measure the policies one after the other, on one thread."""
    if args.steps < 2:
        raise ValueError("--steps: quartiles need at least 2")
    torch.set_num_threads(1)
    runs = ((name, partial(measure, name, args.steps)) for name in args.policies)
    return measured("policy", runs, {"suite": "host"} | machine(_CPU), args.json)
