"""A small model sharded by FSDP2, in nested units, and its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support.block_net import wrap
from support.units import policy


class Net(nn.Module):
    """No size divides by a number of ranks; `head` has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11))
        self.norm = nn.LayerNorm(11)
        self.second = nn.Sequential(nn.Linear(11, 53), nn.Tanh(), nn.Linear(53, 11))
        self.head = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.head(x + self.second(x))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def sharded(**options: Any) -> Any:
    """`Net` in nested units: a layer in a block in the root."""
    model = net()
    for module in (model.first[2], model.first, model.second, model):
        fully_shard(module, **options)
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """A loss on data of this rank and step."""
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1000 * step + rank))
    return (model(x) * x[:, :1]).square().sum()


def local_grads(model: nn.Module) -> dict[str, Tensor]:
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.to_local().clone() for name, grad in grads.items()}


def local_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: local(p).detach().clone() for name, p in model.named_parameters()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, rank: int, steps: int) -> list[dict[str, Tensor]]:
    """This rank's gradient shards of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    history = []
    for step in range(steps):
        loss_of(model, rank, step).backward()
        history.append(local_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return history


EVERYTHING = policy(({"name": "*"}, 0.3))


def two_by_two() -> tuple[Any, Any]:
    """The model, sharded within pairs of ranks, and the mesh of its copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = net()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh["shard"])
    return model, mesh["replicate"]


def of_replicas(t: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The same shard in every copy."""
    out = [torch.empty_like(t) for _ in range(2)]
    dist.all_gather(out, t.contiguous(), group=mesh.get_group())
    return out


def wrapped(policy: dict[str, Any]) -> tuple[Any, DeviceMesh]:
    model, replicas = two_by_two()
    return wrap(model, {"schema": 1, **policy}, replicas=replicas), replicas
