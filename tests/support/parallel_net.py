"""A small model under tensor parallelism, sharded by FSDP2, on meshes of any two sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    """No size divides by a number of ranks. Tensor parallelism divides `up` by rows, which FSDP
    shards, too, and `down` by columns. `norm` is a DTensor that all tensor-parallel ranks have
    whole, and `head` is a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, bias=False)
        self.mlp = Mlp()
        self.head = nn.Linear(7, 3, bias=False)
        self.part, self.parts = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        # `norm` gets this rank's part of the sequence, and `mlp` all of it.
        part = x.chunk(self.parts, dim=1)[self.part]
        return self.head(self.mlp(self.norm(part)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13, bias=False)
        self.down = nn.Linear(13, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).clone()


def parallel(
    data: int,
    tensor: int,
    *,
    tensor_first: bool = False,
    replicas: int = 1,
    in_one_unit: bool = False,
    mesh: Any = None,
) -> Any:
    """The model, divided among `tensor` ranks and then sharded over `data`; either dimension may be
    that of neighbouring ranks. With one tensor-parallel rank it is FSDP2 alone. ``mesh`` may
    have other dimensions besides."""
    sizes = {"tp": tensor, "dp": data} if tensor_first else {"dp": data, "tp": tensor}
    sizes = {"replicas": replicas, **sizes} if replicas > 1 else sizes
    mesh = mesh or init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(1)
    model: Any = Block()
    if tensor > 1:
        plan: Any = {
            "norm": SequenceParallel(),
            # 13 rows divide by no number of ranks: only a DTensor knows the total number.
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["tp"], plan)
        model.part, model.parts = mesh["tp"].get_local_rank(), tensor
    for module in (model,) if in_one_unit else (model.mlp, model):
        fully_shard(module, mesh=mesh["replicas", "dp"] if replicas > 1 else mesh["dp"])
    return model


def loss_of(model: nn.Module, data: int, step: int) -> Tensor:
    """A loss on the data of a step, which tensor-parallel ranks share."""
    x = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(1000 * step + data))
    return model(x).square().sum()
