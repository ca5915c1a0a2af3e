"""Finds the part of a parameter that tensor parallelism gave a rank, before FSDP sharded it.

It reads only public attributes of DTensor: the mesh of a sharded parameter has FSDP's dimensions
and those of tensor (or expert) parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Shard

from tagc.plan import Box, span_of


@dataclass(frozen=True)
class ParallelDim:
    """A dimension of a parameter's mesh that is not FSDP's: this rank's group along it, and the
    parameter's placement."""

    group: dist.ProcessGroup
    placement: Placement

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the group."""
        return _ranks(self.group)

    @property
    def shards(self) -> bool:
        """Whether it divides the parameter; subclasses of ``Shard``, which divide differently, do
        not count."""
        return type(self.placement) is Shard


def parallel_dims(param: Any, sharding: Iterable[dist.ProcessGroup]) -> list[ParallelDim]:
    """The dimensions of a sharded parameter's mesh that are not FSDP's.

    Args:
        sharding: this rank's FSDP groups.
    """
    if not isinstance(param, DTensor):
        return []
    mesh, own = param.device_mesh, {_ranks(group) for group in sharding}
    dims = [ParallelDim(mesh.get_group(i), placed) for i, placed in enumerate(param.placements)]
    return [dim for dim in dims if dim.ranks not in own]


def box_of(shape: tuple[int, ...], dims: Iterable[ParallelDim]) -> Box | None:
    """The part of a parameter of this ``shape`` that the dimensions leave this rank's sharding
    group; None if they do not divide it."""
    box, divided = Box.whole(shape), False
    for dim in dims:
        if isinstance(dim.placement, Shard) and dim.shards:
            along = dim.placement.dim % len(shape)
            box = box.narrow(along, *span_of(box.shape[along], dim.group.rank(), dim.group.size()))
            divided |= dim.group.size() > 1
    # All ranks return a box or none does, even if it is empty or whole on one of them.
    return box if divided else None


def duplicate_of(
    dims: Iterable[ParallelDim],
    sharding: Iterable[dist.ProcessGroup],
    everywhere: Sequence[ParallelDim],
) -> tuple[int, int] | None:
    """Index of this rank's sharding group among the groups that hold the same elements of a
    parameter, and the number of these groups; None if there is only one.

    Args:
        dims: the parameter's dimensions.
        sharding: this rank's FSDP groups for the parameter.
        everywhere: the dimensions of all parameters of the model. A dimension that the parameter's
            own mesh lacks also makes duplicates, unless the other groups divide the parameter among
            these ranks.
    """
    me = dist.get_rank()
    busy = {rank for group in sharding for rank in _ranks(group)}
    busy.update(rank for dim in dims if dim.shards for rank in dim.ranks)
    index, count = 0, 1
    for ranks in dict.fromkeys(dim.ranks for dim in everywhere):
        if busy & {*ranks} == {me}:
            index, count = index * len(ranks) + ranks.index(me), count * len(ranks)
            busy.update(ranks)
    return None if count == 1 else (index, count)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
