"""What a plan says about memory, stored and in buffers, is what tensors take."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import tagc
from support.distributed import as_on_nccl, on_ranks
from support.marks import slow
from support.small_net import loss_of
from support.states import POLICIES, run, wrapped
from tagc.plan import buffers_of


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
