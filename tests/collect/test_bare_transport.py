"""Groups that torch does not know, as a site's group under torchft."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.distributed import on_ranks
from support.elastic import bare_group
from support.failing import fails
from tagc.collect import BareTransport
from tagc.collect.transport import failing_in


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


@on_ranks(2)
@pytest.mark.parametrize("messages", [False, True])
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
