"""``dcp.async_save`` writes the state of its call, while training goes on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.small_net import local_weights
from support.states import POLICIES, load, run, set_weights, shared_folder, snapshot, wrapped


@on_ranks(2)
@pytest.mark.parametrize("loader", ["dcp", "folder"])
def test_training_goes_on(rank: int, world_size: int, loader: str) -> None:
    model, resumed = (wrapped(POLICIES["changes"]) for _ in range(2))
    run(model, rank, range(3))
    weights = local_weights(model)
    saving: Any = dist.new_group(backend="gloo")
    with shared_folder() as folder:
        state = {"tagc": tagc.compressor(model)}
        written = dcp.async_save(state, checkpoint_id=folder, process_group=saving)
        run(model, rank, range(3, 6))
        assert isinstance(written, Future)
        written.result()
        set_weights(resumed, weights)
        load(resumed, folder, loader)
    run(resumed, rank, range(3, 6))
    expected, found = snapshot(model), snapshot(resumed)
    for metrics in (expected.pop("metrics"), found.pop("metrics")):
        assert metrics
    equal(found, expected)
