"""What a plan says about memory is what tensors take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tagc
from support.distributed import on_ranks
from support.marks import slow
from support.states import POLICIES, run, wrapped
from tagc.comm import CopyGatherer, MessageGatherer
from tagc.plan import buffers_of


def stored(model: Any) -> int:
    """Of all tensors that a rank keeps between steps for what the plan counts."""
    compressor = tagc.compressor(model)
    total = 0
    for reducer in (*compressor.reducers, *compressor.replica_reducers):
        for feedback in reducer.feedbacks.values():
            if feedback.residual is not None:
                total += feedback.residual._stored.nbytes
            if feedback.owner_state is not None:
                total += feedback.owner_state.nbytes
    for gatherer in compressor.gatherers:
        if isinstance(gatherer, CopyGatherer):
            total += gatherer.copy.rows.nbytes
        elif isinstance(gatherer, MessageGatherer) and gatherer._forward_message is not None:
            total += gatherer._forward_message.nbytes
    return total


# One of each kind: what they share, others have on two ranks.
ON_HOSTS = (
    "quantized average",
    slow("matrix lead"),
    "sketch",
    slow("packed shared"),
    "parameters",
    "changes",
    "inside",
    slow("inside warming up"),
)
# Each codec, feedback and dtype of residuals is among the others'.
RARE = {
    "quantized residual",
    "matrix int8",
    "matrix average",
    "packed",
    "packed momentum",
    "sketch",
    "warming up",
    "changes in 1 bit",
    "inside",
    "inside warming up",
}


@pytest.mark.some(5)
@on_ranks(2)
@pytest.mark.parametrize("name", [slow(n) if n in RARE else n for n in POLICIES])
def test_a_plan_knows_its_memory(rank: int, world_size: int, name: str) -> None:
    check(rank, name, None)


@pytest.mark.some(2)
@on_ranks(4)
@pytest.mark.parametrize("name", ON_HOSTS)
def test_a_plan_knows_its_memory_on_hosts(rank: int, world_size: int, name: str) -> None:
    check(rank, name, 2)


def check(rank: int, name: str, hosts: int | None) -> None:
    """Stored to the byte, buffers by name."""
    model = wrapped(POLICIES[name], hosts=hosts)
    compressor = tagc.compressor(model)
    plan = compressor.plan()
    run(model, rank, range(2 + max(unit.warmup_steps for unit in plan.units)))
    assert plan.memory.stored == stored(model)
    assert plan.memory.note in str(plan)
    found = compressor.reducers[0]._workspace._buffers
    sizes = {(buffer, dtype): t.numel() for (buffer, dtype, _), t in found.items()}
    expected: dict[tuple[str, torch.dtype], int] = {}
    for unit in plan.all_units:
        for buffer, dtype, numel in buffers_of(unit, gloo=True):
            expected[buffer, dtype] = max(expected.get((buffer, dtype), 0), numel)
    assert sizes == expected
    assert plan.memory.buffers == sum(t.nbytes for t in found.values())
