"""FSDP2 on tensor parallelism: what all of its ranks have stays the same on all of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tagc
from support.distributed import on_ranks
from support.parallel_net import loss_of, parallel

CODECS: dict[str, dict[str, Any]] = {
    "blocks": {"codec": {"kind": "quantized", "bits": 4, "block": 32}},
    "by chance": {
        "codec": {"kind": "quantized", "bits": 4, "block": 32, "rounding": "stochastic"},
        "feedback": {"kind": "none"},
    },
    "sketch": {"codec": {"kind": "sketch", "density": 0.3}},
}


@on_ranks(4)
@pytest.mark.parametrize("codec", CODECS)
def test_parameters_that_are_not_divided_stay_alike(rank: int, world_size: int, codec: str) -> None:
    """The norm and the head: though others share their rule and role, and stand beside them in the
    unit."""
    # Chance depends on columns, which differ where 13 rows are divided by 2.
    model = parallel(2, 2, in_one_unit=codec != "by chance")
    rule = {"when": {"name": "*.weight"}, **CODECS[codec]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tagc.wrap(model, {"schema": 1, "roles": {"mlp": "*"}, "gradients": [rule]})
    for unit in tagc.compressor(model).plan().units:
        assert all(segment.compressed for segment in unit.segments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        loss_of(model, rank // 2, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in ("norm.weight", "head.weight"):
        param: Any = dict(model.named_parameters())[name]
        mine = param.to_local().detach().contiguous()
        everyones = [torch.empty(0)] * world_size
        dist.all_gather_object(everyones, mine)
        assert torch.equal(everyones[rank], everyones[rank ^ 1]), name
