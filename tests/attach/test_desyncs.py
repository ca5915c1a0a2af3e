"""Ranks whose programs differ: where they come to different collectives, all of them raise an error
that names both, before anything of either is used."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tagc
from support.block_net import wrap
from support.distributed import fails, on_ranks
from support.gathering import INT8, KEPT


def policy(parameters: dict[str, Any]) -> dict[str, Any]:
    """Of the block in the middle, parameters are gathered as they are."""
    gradients = {"when": {"name": "*.weight"}, "codec": INT8}
    gathers = {"when": {"name": "blocks.[02].weight"}, "codec": parameters}
    return {"schema": 1, "gradients": [gradients], "parameters": [gathers]}


POLICIES = {
    "8 bits": policy(INT8),
    "kept": policy(KEPT),
    "changes": policy({"kind": "delta", "bits": 4, "block": 32}),
    "dense": "dense",
}


class Blocks(nn.Module):
    """Blocks that are alike, of which one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != skipped:
                x = torch.tanh(block(x))
        return x.square().sum()


class Program:
    """A sharded model after a step, in a group of its own: a desync leaves messages in it."""

    def __init__(self, chosen: Any) -> None:
        group: Any = dist.new_group(timeout=timedelta(seconds=10))
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(1)
        model: Any = Blocks()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self.model = wrap(fully_shard(model, mesh=mesh), chosen, hosts=None)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.forward().backward()
        self.optimizer.step()

    def forward(self, skipped: int | None = None) -> Tensor:
        return self.model(torch.ones(4, 16), skipped)

    def train(self) -> None:
        self.forward().backward()

    def leave_out_a_backward(self) -> None:
        self.forward()
        self.optimizer.step()
        self.forward()

    def leave_out_a_block(self) -> None:
        self.forward(skipped=1)


@on_ranks(2)
@pytest.mark.parametrize("chosen", POLICIES)
def test_programs_that_differ(rank: int, world_size: int, chosen: str) -> None:
    for differ, named in (
        (Program.leave_out_a_block, (r"parameters of unit 'blocks\.1'", r"unit 'blocks\.2'")),
        (Program.leave_out_a_backward, (r"parameters of unit 'blocks\.0'", r"unit 'blocks\.[12]'")),
    ):
        program = Program(POLICIES[chosen])
        call = differ if rank else Program.train
        kind, text = fails(lambda call=call, program=program: call(program))
        assert kind == "DesyncError", text
        assert all(re.search(pattern, text) for pattern in named), text


@on_ranks(2)
def test_a_refresh_on_one_rank_is_named(rank: int, world_size: int) -> None:
    program = Program(POLICIES["changes"])
    if rank:
        tagc.compressor(program.model).refresh()
    kind, text = fails(program.train)
    assert kind == "DesyncError", text
    assert "a refresh() that only some" in text
