"""The mesh of 2 x 2 ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

_meshes: list[Any] = []


def two_by_two() -> Any:
    """One mesh for all cases of a process group: it takes groups of its own."""
    if not _meshes or _meshes[0] is not dist.group.WORLD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        _meshes[:] = [dist.group.WORLD, mesh]
    return _meshes[1]
