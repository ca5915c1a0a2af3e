"""State of FSDP1 models, whose shards cut parameters anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.fsdp import FullyShardedDataParallel

import tagc
from support.distributed import on_ranks
from support.fsdp1_net import CPU, quietly, sharded
from support.small_net import net
from support.small_net import sharded as fsdp2_sharded
from support.states import POLICIES, run

KINDS: dict[str, Callable[[], Any]] = {"1": sharded, "2": fsdp2_sharded}


@on_ranks(2)
@pytest.mark.parametrize("kinds", ["11", "12", "21"])
def test_one_rank_does_not_have_what_another_owned(rank: int, world_size: int, kinds: str) -> None:
    """A state dict is of one rank, which need not have owned all that it owns now."""
    model = quietly(tagc.wrap, KINDS[kinds[0]](), POLICIES["sketch lead"])
    run(model, rank, range(3))
    state = tagc.compressor(model).state_dict()
    make = otherwise_sharded if kinds == "11" else KINDS[kinds[1]]
    other = quietly(tagc.wrap, make(), POLICIES["sketch lead"])
    # Whichever rank finds it out first, the others learn of it.
    with pytest.raises((tagc.StateError, RuntimeError), match=r"elements of|would be dropped"):
        tagc.compressor(other).load_state_dict(state)


def otherwise_sharded() -> Any:
    """FSDP1 with a single unit, which cuts in other places."""
    return FullyShardedDataParallel(net(), device_id=CPU)
