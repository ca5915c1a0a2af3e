"""A unit as FSDP shards it, or DDP replicates it: the input of a plan. A box is the elements of a
tensor between two indices in every dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from tagc.codecs import Special


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it. Fields that may differ between ranks have no ``repr``."""

    name: str
    shape: tuple[int, ...]
    columns: int  # elements in every shard, including padding; FSDP1: in the shard that has most
    dim: int = 0  # FSDP2: the dimension of ``shape`` that is sharded
    start: int | None = None  # FSDP1: index of its first element in the flat buffer
    # FSDP2: shape of every shard, including padding. (With tensor parallelism it does not follow
    # from ``shape``.)
    local: tuple[int, ...] | None = field(default=None, repr=False)
    # With tensor parallelism, the elements of the parameter that this rank's sharding group has;
    # and if several groups have them, the index of this rank's group and their number.
    box: Box | None = field(default=None, repr=False)
    duplicate: tuple[int, int] | None = field(default=None, repr=False)
    frozen: bool = field(default=False, repr=False)  # has no gradient
    special: Special | None = field(default=None, repr=False)  # of a frozen one, on all ranks

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what a rank holds of it, a part of ``shape`` with tensor parallelism."""
        return self.local or self.shape

    @property
    def own(self) -> Box:
        return Box.whole(self.shape) if self.box is None else self.box


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """FSDP1's buffer of a unit, ``[W, columns]``."""

    columns: int  # elements of a shard, including padding
    whole: bool  # whether it holds only ``UnitInfo.params`` and padding, no frozen parameters


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One collective of one unit, on a buffer ``[world_size, sum of columns]`` of ``dtype``."""

    name: str
    params: tuple[UnitParam, ...]  # in the order of FSDP's buffer
    world_size: int
    dtype: torch.dtype
    per_step: int = 1  # 2 for the all-gather of a unit that FSDP reshards after forward
    # How many neighbours in the group share a host. They add their gradients up before one of them
    # sends, and forward received parameters to each other. 1 if every rank sends for itself.
    ranks_per_host: int = 1
    flat: FlatBuffer | None = None  # of FSDP1: parameters have other columns in every row
    replicated: bool = False  # whether each rank has the whole unit (DDP): an all-reduce
    native: str = field(default="", repr=False)  # why FSDP's own collective is used, if it must be

    @property
    def numel(self) -> int:
        return sum(math.prod(param.shape) for param in self.params)

    @cached_property
    def label(self) -> str:
        """The name in texts for users: the root module has no name of its own."""
        return self.name or "(root)"

    @cached_property
    def dtype_name(self) -> str:
        """The dtype as a policy writes it."""
        return str(self.dtype).removeprefix("torch.")

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


class Box(NamedTuple):
    """In every dimension ``d`` of a tensor, ``shape[d]`` indices from ``start[d]`` on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All elements of a tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.start, self.shape, strict=True))

    def narrow(self, dim: int, first: int, length: int) -> Box:
        """``length`` indices of one dimension, counted from this box's own ``first``."""
        start, shape = [*self.start], [*self.shape]
        start[dim] += first
        shape[dim] = length
        return Box(tuple(start), tuple(shape))

    def overlap(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self.stop, other.stop)
        shape = tuple(last - first for first, last in zip(start, stop, strict=True))
        return Box(start, shape) if min(shape, default=1) > 0 else None

    def index(self, part: Box) -> tuple[slice, ...]:
        """Where the elements of ``part`` are in a tensor that has this box's elements."""
        firsts = (inner - outer for inner, outer in zip(part.start, self.start, strict=True))
        return tuple(slice(a, a + n) for a, n in zip(firsts, part.shape, strict=True))

    def runs(self, first: int, last: int) -> Iterator[Box]:
        """Elements ``first`` to ``last`` (exclusive) of this box flattened, as consecutive boxes.
        In ``[4, 10]``, elements 7 to 25 are the end of a row, a row, and the start of a row."""
        if first >= last:
            return
        if len(self.shape) < 2:
            yield self.narrow(0, first, last - first) if self.shape else self
            return
        size = math.prod(self.shape[1:])
        low, high = -(-first // size), last // size
        if low > high:  # within one row
            yield from self._in_row(high, first, last)
            return
        yield from self._in_row(low - 1, first, low * size)
        if low < high:
            yield self.narrow(0, low, high - low)
        yield from self._in_row(high, high * size, last)

    def _in_row(self, row: int, first: int, last: int) -> Iterator[Box]:
        before = row * math.prod(self.shape[1:])
        for box in Box(self.start[1:], self.shape[1:]).runs(first - before, last - before):
            yield Box((self.start[0] + row, *box.start), (1, *box.shape))


def span_of(length: int, shard: int, shards: int) -> tuple[int, int]:
    """First index and length of a shard of ``length`` indices, as ``torch.chunk`` cuts them."""
    chunk = -(-length // shards)
    first = min(shard * chunk, length)
    return first, min(chunk, length - first)
