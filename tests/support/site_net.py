"""A small model in several sites, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tagc
from support.small_net import Net, loss_of, net, sharded

DENSE = {"when": {}, "codec": {"kind": "dense"}}
FOUR_BITS = {
    "when": {"name": "*.weight"},
    "codec": {"kind": "quantized", "bits": 4, "block": 32},
    "feedback": {"kind": "residual"},
}


def policy(rule: dict[str, Any] = DENSE, **sites: Any) -> dict[str, Any]:
    return {"schema": 1, "gradients": [rule], "sites": {"every": 3} | sites}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, data, step).backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def in_sites(rules: dict[str, Any]) -> tuple[Net, torch.optim.Optimizer, Any]:
    """A model on one device in sites, its optimizer and its handle."""
    model = net()
    optimizer = adam(model)
    return model, optimizer, tagc.sites(model, optimizer, rules)


def inside(kind: str, rank: int, world_size: int) -> tuple[nn.Module, Any, int]:
    """A model as a site holds it, this rank's counterparts, and its site. Ranks of a site get equal
    data, so that averages inside a site are exact."""
    if kind == "one device":
        return net(), None, rank
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("site", "shard"))
    if kind == "DDP":
        model = DistributedDataParallel(net(), process_group=mesh["shard"].get_group())
    else:
        model = sharded(mesh=mesh["shard"])
    return model, mesh["site"], rank // 2
