"""Which part of a parameter tensor parallelism left a rank, before FSDP sharded it.

By public names of DTensor: a sharded parameter has a mesh with FSDP's dimensions and those of
tensor (or expert) parallelism.
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
    """A dimension of a parameter's mesh that is not FSDP's: its group of this rank, and what it
    does with the parameter."""

    group: dist.ProcessGroup
    placement: Placement

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those of the group."""
        return _ranks(self.group)

    @property
    def shards(self) -> bool:
        """Whether it divides the parameter; a subclass of ``Shard`` divides it in another way."""
        return type(self.placement) is Shard


def parallel_dims(param: Any, sharding: Iterable[dist.ProcessGroup]) -> list[ParallelDim]:
    """The dimensions of a sharded parameter's mesh that are not FSDP's.

    Args:
        sharding: FSDP's groups of this rank.
    """
    if not isinstance(param, DTensor):
        return []
    mesh, own = param.device_mesh, {_ranks(group) for group in sharding}
    dims = [ParallelDim(mesh.get_group(i), placed) for i, placed in enumerate(param.placements)]
    return [dim for dim in dims if dim.ranks not in own]


def box_of(shape: tuple[int, ...], dims: Iterable[ParallelDim]) -> Box | None:
    """What the dimensions leave this rank's sharding group of a parameter ``shape``; None if they
    do not divide it."""
    box, divided = Box.whole(shape), False
    for dim in dims:
        if isinstance(dim.placement, Shard) and dim.shards:
            along = dim.placement.dim % len(shape)
            box = box.narrow(along, *span_of(box.shape[along], dim.group.rank(), dim.group.size()))
            divided |= dim.group.size() > 1
    # On all ranks or on none, whatever is left for one of them.
    return box if divided else None


def duplicate_of(
    dims: Iterable[ParallelDim],
    sharding: Iterable[dist.ProcessGroup],
    everywhere: Sequence[ParallelDim],
) -> tuple[int, int] | None:
    """Which of the sharding groups with the same elements of a parameter this rank is in, and how
    many there are; None if there is one.

    Args:
        dims: of the parameter.
        sharding: FSDP's groups of this rank, for the parameter.
        everywhere: dimensions of all parameters of the model. One that the parameter's own mesh
            lacks makes duplicates of it, too, unless the other groups divide the parameter among
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
