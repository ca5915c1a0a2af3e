"""Boxes: the elements of a tensor between two indices in every dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


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
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The index after the last, in every dimension."""
        return tuple(first + length for first, length in zip(self.start, self.shape, strict=True))

    def narrow(self, dim: int, first: int, length: int) -> Box:
        """``length`` indices of one dimension, counted from this box's own ``first``."""
        start, shape = [*self.start], [*self.shape]
        start[dim] += first
        shape[dim] = length
        return Box(tuple(start), tuple(shape))

    def overlap(self, other: Box) -> Box | None:
        """The elements in both boxes; None if there are none."""
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
