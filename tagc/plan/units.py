"""A unit as FSDP shards it: what a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from tagc.codecs import Special
from tagc.plan.boxes import Box


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it.

    Attributes:
        columns: elements in every shard, padding included; FSDP1: in the shard that has most.
        dim: FSDP2: dimension of ``shape`` that is sharded.
        start: FSDP1 only: its first element in the flat buffer.
        local: FSDP2: shape of every shard, padding included. (With tensor parallelism ``shape``
            does not say.)
        box: with tensor parallelism, the elements of the parameter that this rank's sharding group
            has; None for all of them.
        duplicate: with tensor parallelism, which of the sharding groups that have the same elements
            this rank is in, and how many there are; None if there is one.
        frozen: whether it has no gradient.
        special: what is special about the values of a frozen one, on all ranks together.
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
    def own(self) -> Box:
        """The elements of the parameter that this rank's sharding group has."""
        return Box.whole(self.shape) if self.box is None else self.box


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """FSDP1's buffer of a unit, ``[W, columns]``.

    Attributes:
        columns: elements of a shard, padding included.
        whole: whether it holds nothing but the unit's parameters and padding: no frozen ones.
    """

    columns: int
    whole: bool


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One collective of one FSDP unit.

    Attributes:
        params: in the order of FSDP's buffer.
        world_size: ranks that take part.
        dtype: of the buffer, which is ``[world_size, sum of columns]``.
        per_step: how often it runs in a step: 2 for the all-gather of a unit that FSDP reshards
            after forward.
        ranks_per_host: so many ranks, neighbours in the group, add their gradients up before one
            of them sends, and hand on to each other the parameters that one of them gets; 1 where
            everyone sends for itself.
        flat: FSDP1's buffer, in which parameters have no columns of their own.
        native: why it stays as it is, whatever a policy says; nothing where it need not.
    """

    name: str
    params: tuple[UnitParam, ...]
    world_size: int
    dtype: torch.dtype
    per_step: int = 1
    ranks_per_host: int = 1
    flat: FlatBuffer | None = None
    native: str = field(default="", repr=False)

    @cached_property
    def label(self) -> str:
        """For people: the root module has no name."""
        return self.name or "(root)"
