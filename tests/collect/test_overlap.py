"""Parameters gathered in advance, collectives that end late, and groups unknown to torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from support.block_net import wrap
from support.distributed import on_ranks
from support.elastic import bare_group
from support.small_net import loss_of, sharded
from support.units import codec_plan, normal, reduce, unit_reducer
from tagc.collect import BareTransport, CollectiveWork, Transport
from tagc.collect.transport import failing_in

QUANTIZED: dict[str, Any] = {"kind": "quantized", "bits": 4, "block": 32}
# Its counts are in flight until the unit's next step.
SKETCH: dict[str, Any] = {"kind": "sketch", "density": 0.3, "symbol": "int8x4"}


@on_ranks(2)
def test_an_unshard_in_advance_has_the_same_bits(rank: int, world_size: int) -> None:
    """Before FSDP's first forward, when it has no streams, and later."""
    rule = {"when": {"name": "second*weight"}, "codec": QUANTIZED | {"bits": 8}}
    model = wrap(sharded(), {"schema": 1, "extends": "dense", "parameters": [rule]})
    for began in (False, True):
        if began:
            loss_of(model, rank, 0).backward()
        model.second.unshard()
        expected = [p.clone() for p in model.second.parameters()]
        model.second.reshard()
        model.second.unshard(async_op=True).wait()
        for found, whole in zip(model.second.parameters(), expected, strict=True):
            assert torch.equal(found, whole)
        model.second.reshard()


def late(original: Any) -> Any:
    """The collective, which here begins only when it is waited for."""

    def start(*args: Any, **how: Any) -> CollectiveWork:
        return CollectiveWork([SimpleNamespace(wait=lambda: original(*args, **how).wait())], 0)

    return start


@on_ranks(2)
@pytest.mark.parametrize("codec", [QUANTIZED, SKETCH], ids=["quantized", "sketch"])
def test_what_arrives_late_is_waited_for(rank: int, world_size: int, codec: dict[str, Any]) -> None:
    """Messages and cells before they are decoded, counts before they steer the thresholds."""
    plan = codec_plan(world_size, codec)
    in_time, at_last = unit_reducer(plan), unit_reducer(plan)
    starts = {name: late(getattr(Transport, name)) for name in ("all_to_all", "all_reduce")}
    for step in range(3):
        grad = normal(world_size, plan.columns, step)[rank]
        expected = reduce(in_time, grad)
        with patch.multiple(Transport, **starts):
            assert torch.equal(reduce(at_last, grad), expected)


# Groups that torch does not know


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
