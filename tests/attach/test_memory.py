"""What a plan says about memory is what tensors take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tagc
from support.distributed import as_on_nccl, on_ranks
from support.live_bytes import stored_bytes
from support.marks import slow
from support.states import POLICIES, run, wrapped
from support.units import matrix_plan, reduce, unit_reducer
from tagc.plan import Direction, buffers_of

# One of each kind: what they share, others have on two ranks.
ON_HOSTS = (
    "quantized average",
    slow("matrix lead"),
    "sketch",
    slow("sketch shared"),
    "parameters",
    "changes",
    "inside",
    slow("inside warming up"),
)
# Each codec, feedback and dtype of residuals is among the others'.
RARE = {
    "quantized residual",
    "matrix average",
    "sketch",
    "warming up",
    "changes in 2 bits",
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


@on_ranks(4)
@pytest.mark.parametrize("hosts", [None, 2])
@pytest.mark.parametrize("name", ["sketch", slow("warming up")])
def test_a_plan_knows_its_memory_on_nccl(
    rank: int, world_size: int, name: str, hosts: int | None
) -> None:
    """Without the buffers in which gloo's sums arrive."""
    with as_on_nccl():
        check(rank, name, hosts, gloo=False)


@on_ranks(3)
@pytest.mark.parametrize("direction", ["gradients", "replicas"])
@pytest.mark.parametrize("codec", [{"kind": "matrix"}, {"kind": "quantized"}], ids=str)
def test_buffers_of_segments_of_several_sizes(
    rank: int, world_size: int, codec: dict[str, Any], direction: Direction
) -> None:
    """The largest counts, not the last; and a slice of every dtype."""
    feedback = {"kind": "residual", "lead": 0.8}
    plan = matrix_plan(world_size, codec, feedback, torch.bfloat16, direction)
    reducer = unit_reducer(plan)
    reduce(reducer, torch.ones(plan.rows, plan.columns, dtype=torch.bfloat16))
    found = reducer.store.workspace._buffers
    sizes = {(buffer, dtype): t.numel() for (buffer, dtype, _), t in found.items()}
    expected: dict[tuple[str, torch.dtype], int] = {}
    for buffer, dtype, numel in buffers_of(plan, gloo=True):
        expected[buffer, dtype] = max(expected.get((buffer, dtype), 0), numel)
    assert sizes == expected
    generation = reducer.store.workspace.generation
    reduce(reducer, torch.ones(plan.rows, plan.columns, dtype=torch.bfloat16))
    assert reducer.store.workspace.generation == generation


def check(rank: int, name: str, hosts: int | None, *, gloo: bool = True) -> None:
    """Stored to the byte, buffers by name."""
    model = wrapped(POLICIES[name], hosts=hosts)
    compressor = tagc.compressor(model)
    plan = compressor.plan()
    run(model, rank, range(2 + max(unit.warmup_steps for unit in plan.units)))
    assert plan.memory.stored == stored_bytes(model)
    assert plan.memory.note in str(plan)
    found = compressor.reducers[0].store.workspace._buffers
    sizes = {(buffer, dtype): t.numel() for (buffer, dtype, _), t in found.items()}
    expected: dict[tuple[str, torch.dtype], int] = {}
    for unit in plan.all_units:
        for buffer, dtype, numel in buffers_of(unit, gloo=gloo):
            expected[buffer, dtype] = max(expected.get((buffer, dtype), 0), numel)
    assert sizes == expected, sizes.items() ^ expected.items()
    assert plan.memory.buffers == sum(t.nbytes for t in found.values())
