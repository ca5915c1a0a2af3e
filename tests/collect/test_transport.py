"""Sums over ranks, and the bytes they are said to cost."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.distributed import on_ranks
from tagc.collect import Transport


@on_ranks(2, 3)
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_rows_are_summed_at_the_ideal_cost(rank: int, world_size: int, backend: str) -> None:
    """Whatever a group calls its backend, gloo's own reduce-scatter is not taken."""
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    rows = torch.arange(world_size * 5, dtype=torch.int32).view(world_size, 5) + rank
    out, scratch = torch.full((5,), -7, dtype=torch.int32), torch.full_like(rows, -7)
    pending = Transport(group).sum_each(out[None], rows[None], scratch[None])
    assert torch.equal(scratch[rank], rows[rank])  # messages, to be added here
    pending.wait()
    mine = torch.arange(rank * 5, rank * 5 + 5, dtype=torch.int32)
    assert torch.equal(out, world_size * mine + sum(range(world_size)))
    assert pending.wire_bytes == (world_size - 1) * 5 * 4


@on_ranks(3)
def test_owners_get_the_columns_that_they_need(rank: int, world_size: int) -> None:
    """The others are zeros; an owner that needs none sends all the same."""
    group = dist.group.WORLD
    assert group is not None
    columns = [slice(0, 2), slice(0, 0), slice(1, 5)]
    sent = torch.arange(15, dtype=torch.int32).view(3, 5) + 100 * rank
    out = torch.full_like(sent, -7)
    pending = Transport(group).all_to_all(out, sent, columns)
    pending.wait()
    expected = torch.zeros_like(out)
    for r in range(world_size):
        mine = torch.arange(5 * rank, 5 * rank + 5, dtype=torch.int32) + 100 * r
        expected[r, columns[rank]] = mine[columns[rank]]
    assert torch.equal(out, expected)
    assert pending.wire_bytes == 4 * {0: 0 + 4, 1: 2 + 4, 2: 2 + 0}[rank]
