"""What a plan says about memory: what is stored and buffers are what tensors take, temporary
tensors at least what torch's operations take."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch

import tagc
from support.distributed import as_on_nccl, on_ranks
from support.gathering import INT8
from support.marks import slow
from support.profiling import profiled_functions
from support.small_net import loss_of
from support.states import POLICIES, run, wrapped
from support.units import codec_plan, matrix_plan, normal, reduce, unit_reducer
from tagc.plan import buffers_of
from tagc.plan.programs import memory_of


@on_ranks(timeout=200)
@pytest.mark.parametrize(
    ("world_size", "hosts", "gloo", "names"),
    [
        (2, None, True, ("quantized average", "matrix lead", "sketch shared", "parameters")),
        (4, 2, True, ("changes", "inside")),
        # Without the buffers in which gloo's sums arrive.
        (2, None, False, ("sketch",)),
        slow(2, None, True, tuple(POLICIES)),
    ],
)
def test_a_plan_knows_its_memory(
    rank: int, world_size: int, hosts: int | None, gloo: bool, names: tuple[str, ...]
) -> None:
    """Stored to the byte, buffers by name."""
    with nullcontext() if gloo else as_on_nccl():
        for name in names:
            model = wrapped(POLICIES[name], hosts=hosts)
            compressor = tagc.compressor(model)
            plan = compressor.plan()
            run(model, rank, range(2 + max(unit.warmup_steps for unit in plan.units)))
            with torch.no_grad():  # whose messages are not kept for a backward
                loss_of(model, rank, 9)
            assert plan.memory.stored == stored_bytes(model), name
            assert plan.memory.note in str(plan)
            found = compressor.reducers[0].store.workspace._buffers
            sizes = {(buffer, dtype): t.numel() for (buffer, dtype, _), t in found.items()}
            expected = buffers_of(plan.all_units, gloo=gloo)
            assert sizes == expected, (name, sizes.items() ^ expected.items())
            assert plan.memory.buffers == sum(t.nbytes for t in found.values()), name


SLACK = 6000
"""Bytes of counters, thresholds and headers."""


@on_ranks(2)
@pytest.mark.parametrize(
    ("codec", "feedback", "dtype"),
    [
        (INT8 | {"bits": 4, "rounding": "stochastic"}, {"kind": "none"}, torch.float16),
        ({"kind": "matrix"}, {"kind": "residual", "lead": 0.8}, torch.float16),
        ({"kind": "sketch", "density": 0.2}, {"kind": "residual"}, torch.float32),
    ],
    ids=["quantized", "matrix", "sketch"],
)
def test_a_reduction_takes_no_more(
    rank: int, world_size: int, codec: dict[str, Any], feedback: dict[str, Any], dtype: torch.dtype
) -> None:
    plan = (matrix_plan if codec["kind"] == "matrix" else codec_plan)(
        world_size, codec, feedback, dtype
    )
    reducer = unit_reducer(plan, "cpu")
    buffers = [normal(world_size, plan.columns, step)[rank].to(dtype) for step in range(3)]
    for buffer in buffers:
        taken = peak_of(lambda buffer=buffer: reduce(reducer, buffer))
    # What the test's own function makes: a copy of the buffer, and the shard.
    taken -= (world_size + 1) * plan.columns * dtype.itemsize
    planned = memory_of([plan], gloo=True).moment
    assert taken <= planned + SLACK, (taken, planned)
    # The compiled kernels' own scratch is not torch's.
    messages = plan.messages
    unseen = max(s.codec.scratch_bytes(messages.made, messages.read) for s in plan.segments)
    assert planned - unseen <= 2.2 * taken + SLACK, (taken, planned)


def peak_of(call: Callable[[], Any]) -> int:
    """Peak bytes of a call's tensors."""
    with torch.no_grad(), profiled_functions(profile_memory=True) as found:
        call()
    events = found.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(accumulate(changes))


def stored_bytes(model: Any) -> int:
    """Bytes of all tensors that a rank keeps between steps and that the plan counts."""
    compressor = tagc.compressor(model)
    total = 0
    for reducer in (*compressor.reducers, *compressor.replica_reducers):
        for stored in (reducer.residuals, reducer.owner_residuals, reducer.owner_states):
            total += sum(tensor.nbytes for tensor in stored.values())
    for gatherer in compressor.gatherers:
        total += sum(t.nbytes for name, t in gatherer.store if name in ("copy", "kept_message"))
    return total
