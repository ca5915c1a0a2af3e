"""Sums over ranks and the bytes that they count; groups that torch does not know; the turns
that units take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from support.distributed import on_ranks
from support.elastic import bare_group
from tagc.collect import BareTransport, Transport
from tagc.collect.transport import failing_in
from tagc.site.anchor import in_turns


@on_ranks(3)
def test_rows_are_summed_at_the_ideal_cost(rank: int, world_size: int) -> None:
    """Whatever a group calls its backend, gloo's own reduce-scatter is not taken."""
    group = dist.new_group(backend="cpu:gloo")
    assert isinstance(group, dist.ProcessGroup)
    rows = torch.arange(world_size * 5, dtype=torch.int32).view(world_size, 5) + rank
    out, scratch = torch.full((5,), -7, dtype=torch.int32), torch.full_like(rows, -7)
    pending = Transport(group).sum_each(out[None], rows[None], scratch[None])
    assert torch.equal(scratch[rank], rows[rank])  # messages, to be added here
    pending.wait()
    mine = torch.arange(rank * 5, rank * 5 + 5, dtype=torch.int32)
    assert torch.equal(out, world_size * mine + sum(range(world_size)))
    assert pending.wire_bytes == (world_size - 1) * 5 * 4


@on_ranks(2)
def test_a_rank_that_is_missing_is_named(rank: int, world_size: int) -> None:
    """In a group that torch does not know, as a site's under torchft: torch's functions would fail
    with an error about the group."""
    store = dist.PrefixStore("bare", dist.distributed_c10d._get_default_store())
    transport = BareTransport(bare_group(store, rank, world_size, seconds=0.5))
    calls = (
        lambda: transport.gather_values(torch.ones(3)),
        lambda: transport.gather(torch.ones(2, 3), torch.ones(1, 3)).wait(),
    )
    for call in calls if rank == 0 else ():
        with (
            pytest.raises(RuntimeError, match="testing failed on rank 0 of 2"),
            failing_in("testing", transport.group),
        ):
            call()
    dist.barrier()


def test_units_take_turns_as_far_as_memory_allows() -> None:
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for part in range(3):
            done.append(f"{name}{part}")
            if part < 2:
                yield

    in_turns(zip([2**23, 2**23, 1], map(work, "abc"), strict=True))
    assert " ".join(done) == "a0 b0 a1 b1 a2 c0 b2 c1 c2"
