"""An exchange in two levels fits the contract: ranks of a host add up first, one message a host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.failing import fails
from support.host_reducers import RANKS_PER_HOST, host_reducer, in_two_levels
from support.units import codec_plan, gathered, on_grid
from tagc.collect import UnitReducer
from tagc.plan import Segment

EXACT: Any = {"rtol": 0, "atol": 0}
CODECS: dict[str, dict[str, Any]] = {
    "quantized": {"kind": "quantized", "bits": 8, "block": 64},
    "packed": {"kind": "packed", "density": 0.3, "bits": 8},
    "sketch": {"kind": "sketch", "density": 0.3, "symbol": "int16x2"},
    "shared sketch": {"kind": "sketch", "density": 0.3, "symbol": "int16x2", "support": "shared"},
}


@pytest.mark.some(2)
@on_ranks(4)
@pytest.mark.parametrize("codec", CODECS)
def test_two_levels_conserve_what_one_does(rank: int, world_size: int, codec: str) -> None:
    """To the bit on a grid: what owners got, and what ranks still owe, is what came in; and a rank
    stores a residual for every host, not for every rank."""
    hosts = world_size // RANKS_PER_HOST
    flat = codec_plan(world_size, CODECS[codec], {"kind": "residual"})
    plan = in_two_levels(flat, CODECS[codec])
    assert (plan.messages.made, plan.messages.read) == (hosts, hosts)
    with host_reducer(rank, plan) as reducer:
        conserves(reducer, rank, world_size)


def conserves(reducer: UnitReducer, rank: int, world_size: int) -> None:
    plan, group, hosts = reducer.plan, dist.group.WORLD, reducer.plan.peers
    assert group is not None
    came_in = torch.zeros(world_size, plan.columns, dtype=torch.float64)
    handed_out = torch.zeros(plan.columns, dtype=torch.float64)
    for step in range(6):
        buffers = on_grid(world_size, plan.columns, step)
        came_in += buffers.double().sum(0)
        out = torch.full((plan.columns,), torch.nan)
        reducer.reduce(out, buffers[rank].reshape(-1), group, dist.ReduceOp.SUM)
        handed_out += out.double()
        for segment in plan.compressed:
            check_conserved(reducer, segment, came_in, handed_out, rank)
    for segment in plan.dense:
        span = slice(segment.start, segment.stop)
        torch.testing.assert_close(handed_out[span], came_in[rank, span], **EXACT)
    planned = 6 * sum(plan.wire_bytes(s) for s in plan.segments)
    # Sketches agree once on their first thresholds: a float for each segment and destination.
    summed = [segment for segment in plan.segments if segment.codec.cells]
    first = 4 * (hosts - 1) * hosts * len(summed)
    assert reducer.wire_bytes == planned + first
    assert reducer.counters.inside_bytes == 6 * plan.inside_bytes


@on_ranks(4)
@pytest.mark.parametrize("micro", [False, True])
def test_ranks_at_different_units(rank: int, world_size: int, micro: bool) -> None:
    """Inside a host and between hosts: an error with the names of both."""
    plan = in_two_levels(codec_plan(world_size, CODECS["packed"]), CODECS["packed"])
    mine = "second" if rank in (0, 3) else "first"
    renamed = replace(plan, info=replace(plan.info, name=mine))
    out, buffer = torch.zeros(plan.columns), torch.ones(world_size * plan.columns)
    group = dist.group.WORLD
    assert group is not None
    with host_reducer(rank, renamed, crosses=lambda: not micro) as reducer:
        kind, said_of_it = fails(lambda: reducer.reduce(out, buffer, group, dist.ReduceOp.SUM))
    assert kind == "DesyncError"
    assert "unit 'first'" in said_of_it
    assert "unit 'second'" in said_of_it


def check_conserved(
    reducer: UnitReducer, segment: Segment, came_in: Tensor, handed_out: Tensor, rank: int
) -> None:
    span = slice(segment.start, segment.stop)
    residual = reducer.residuals[segment.start]
    assert residual.shape == (reducer.plan.messages.made, segment.columns)
    # Of this rank's shard those of the same place on every host owe something.
    everyones = gathered(residual).double()  # [rank, host, columns]
    owed = everyones[rank % RANKS_PER_HOST :: RANKS_PER_HOST, rank // RANKS_PER_HOST].sum(0)
    torch.testing.assert_close(handed_out[span] + owed, came_in[rank, span], **EXACT)
    assert owed.any()
