"""Sums over ranks and the bytes they are said to cost; groups that torch does not know; the turns
that units take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from support.distributed import on_ranks
from support.elastic import bare_group
from support.failing import fails
from tagc.collect import BareTransport, Transport
from tagc.collect.transport import failing_in
from tagc.site.anchor import in_turns


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


# Groups that torch does not know, as a site's group under torchft


def transport_of(rank: int, world_size: int, seconds: float = 20) -> BareTransport:
    store = dist.PrefixStore("bare", dist.distributed_c10d._get_default_store())
    return BareTransport(bare_group(store, rank, world_size, seconds))


@on_ranks(3)
def test_collectives(rank: int, world_size: int) -> None:
    transport = transport_of(rank, world_size)
    total = torch.full((5,), float(rank))
    transport.all_reduce(total).wait()
    assert total.tolist() == [3.0] * 5
    values, sent = transport.gather_values(torch.tensor([rank, 7]))
    assert values.tolist() == [[0, 7], [1, 7], [2, 7]]
    assert sent == 2 * 2 * 8
    rows = torch.empty(3, 2)
    transport.gather(rows, torch.full((1, 2), float(rank))).wait()
    assert rows[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("messages", [False, True])
@on_ranks(2)
def test_a_rank_that_is_missing_is_named(rank: int, world_size: int, messages: bool) -> None:
    """torch's functions would say that they do not know the group."""
    transport = transport_of(rank, world_size, 0.5)
    if rank == 0:

        def gather() -> None:
            with failing_in("gathering", transport.group):
                if messages:
                    transport.gather(torch.ones(2, 3), torch.ones(1, 3)).wait()
                else:
                    transport.gather_values(torch.ones(3))

        kind, said = fails(gather)
        assert kind == "RuntimeError"
        assert "gathering failed on rank 0 of 2" in said
    dist.barrier()


# Units in turns


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ([1, 1], "a0 b0 a1 b1 a2 b2"),
        ([2**23, 2**23, 1], "a0 b0 a1 b1 a2 c0 b2 c1 c2"),
        ([2**25, 1, 1], "a0 a1 a2 b0 c0 b1 c1 b2 c2"),
        ([1, 2**25], "a0 a1 a2 b0 b1 b2"),
        ([], ""),
    ],
    ids=["both", "as many as fit", "a large one first", "a large one last", "none"],
)
def test_order(sizes: list[int], order: str) -> None:
    done: list[str] = []

    def work(name: str) -> Iterator[None]:
        for part in range(3):
            done.append(f"{name}{part}")
            if part < 2:
                yield

    in_turns(zip(sizes, map(work, "abc"), strict=False))
    assert " ".join(done) == order
