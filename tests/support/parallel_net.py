"""A small model under tensor parallelism, sharded by FSDP2, on meshes of any two sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

NAMES = ("norm.weight", "mlp.up.weight", "mlp.down.weight", "head.weight")


class Block(nn.Module):
    """No size divides by a number of ranks. `up` is divided by rows, which FSDP shards as well,
    `down` by columns, `norm` is a DTensor that all tensor-parallel ranks have, and `head` a plain
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, bias=False)
        self.mlp = Mlp()
        self.head = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.norm(x)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13, bias=False)
        self.down = nn.Linear(13, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).clone()


def parallel(data: int, tensor: int) -> tuple[Any, DeviceMesh]:
    """The model on a mesh ("dp", "tp"); a dimension of one rank is left out."""
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model: Any = Block()
    if tensor > 1:
        plan: Any = {
            "norm": SequenceParallel(),
            # 13 rows divide by no number of ranks: only a DTensor knows how many there are in all.
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], plan)
    for module in (model.mlp, model):
        fully_shard(module, mesh=mesh["dp"])
    return model, mesh


def loss_of(model: nn.Module, data: int, step: int) -> Tensor:
    """A loss on the data of a step, which tensor-parallel ranks share."""
    x = torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(1000 * step + data))
    return model(x).square().sum()
