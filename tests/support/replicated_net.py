"""The small model sharded within pairs of ranks, and its copies."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import tagc
from support.small_net import net


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
    with warnings.catch_warnings():
        # Units as small as these may send more when compressed.
        warnings.simplefilter("ignore")
        return tagc.wrap(model, {"schema": 1, **policy}, replicas=replicas), replicas
