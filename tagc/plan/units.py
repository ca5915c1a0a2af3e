"""A unit as FSDP shards it, or DDP replicates it: the input of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from tagc.codecs import Special
from tagc.plan.boxes import Box


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it.

    Attributes:
        columns: elements in every shard, including padding; FSDP1: in the shard that has most.
        dim: FSDP2: the dimension of ``shape`` that is sharded.
        start: FSDP1 only: index of its first element in the flat buffer.
        local: FSDP2: shape of every shard, including padding. (With tensor parallelism it does not
            follow from ``shape``.)
        box: with tensor parallelism, the elements of the parameter that this rank's sharding group
            has; None for all of them.
        duplicate: with tensor parallelism, if several sharding groups have the same elements: the
            index of this rank's group among them, and their number; None if only one has them.
        frozen: whether it has no gradient.
        special: a property of a frozen parameter's values, on all ranks together.
    """

    name: str
    shape: tuple[int, ...]
    columns: int
    dim: int = 0
    start: int | None = None
    local: tuple[int, ...] | None = field(default=None, repr=False)
    box: Box | None = field(default=None, repr=False)
    duplicate: tuple[int, int] | None = field(default=None, repr=False)
    frozen: bool = field(default=False, repr=False)
    special: Special | None = field(default=None, repr=False)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what a rank holds of it, a part of ``shape`` with tensor parallelism."""
        return self.local or self.shape

    @property
    def own(self) -> Box:
        """The elements of the parameter that this rank's sharding group has."""
        return Box.whole(self.shape) if self.box is None else self.box


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """FSDP1's buffer of a unit, ``[W, columns]``.

    Attributes:
        columns: elements of a shard, including padding.
        whole: whether it holds only ``UnitInfo.params`` and padding, and no frozen parameters.
    """

    columns: int
    whole: bool


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One collective of one unit.

    Attributes:
        params: its parameters in the order of FSDP's buffer.
        world_size: how many ranks take part.
        dtype: the dtype of the buffer ``[world_size, sum of columns]``.
        per_step: how often it runs in a step: 2 for the all-gather of a unit that FSDP reshards
            after forward.
        ranks_per_host: how many neighbours in the group share a host. They add their gradients up
            before one of them sends, and forward received parameters to each other. 1 if every rank
            sends for itself.
        flat: FSDP1's buffer, in which parameters do not have the same columns in every row.
        replicated: whether each rank has the whole unit (DDP), so gradients are all-reduced.
        native: why FSDP's own collective is used whatever the policy says; empty if it need not be.
    """

    name: str
    params: tuple[UnitParam, ...]
    world_size: int
    dtype: torch.dtype
    per_step: int = 1
    ranks_per_host: int = 1
    flat: FlatBuffer | None = None
    replicated: bool = False
    native: str = field(default="", repr=False)

    @property
    def numel(self) -> int:
        """Elements of its parameters."""
        return sum(math.prod(param.shape) for param in self.params)

    @cached_property
    def label(self) -> str:
        """The name in texts for users: the root module has no name of its own."""
        return self.name or "(root)"

    def in_one_level(self) -> UnitInfo:
        """The same collective if every rank sends for itself."""
        params = self.params
        if self.replicated:  # with DDP a rank then has whole parameters, not a host's part
            params = tuple(replace(param, columns=math.prod(param.local_shape)) for param in params)
        return replace(self, params=params, ranks_per_host=1)


def between_sites(unit: UnitInfo, sites: int) -> UnitInfo:
    """The exchange between sites of a unit's shard. Changes are small differences of parameters, so
    they are computed in float32, whatever the parameters have."""
    return replace(
        unit, world_size=sites, dtype=torch.float32, per_step=1, ranks_per_host=1, replicated=True
    )
