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
