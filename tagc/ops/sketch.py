"""Shape of a count sketch: groups, index words, cells, and the cells needed for a number of keys.

A key is the index of a group. It owns one cell in each of ``hashes`` equal partitions of the
table. The owner of the shard knows which keys are present, so decoding is peeling a random
``hashes``-uniform hypergraph, which succeeds with high probability above a threshold of
1.222 / 1.295 / 1.425 / 1.570 cells per key for 3 / 4 / 5 / 6 hashes (Dietzfelbinger & Walzer).

A finite table can fail in two ways, which determine the numbers here:

* the threshold varies by about ``0.8 / sqrt(keys)`` (standard deviation, measured), so a margin of
  ``4.5 / sqrt(keys)`` is added;
* two keys that share *all* their cells cannot be told apart, which happens with probability about
  ``keys**2 / (2 * partition**hashes)``: fewer keys need more hashes.

If the table would be as large as the shard itself, key ``k`` simply owns cell ``k`` (``direct``).
Then there is nothing to peel, and decoding cannot fail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from tagc.ops.symbols import Symbol

# (at least this many keys, hashes, peeling threshold in cells per key)
_HASHES_BY_KEYS = (
    (1 << 22, 3, 1.222),
    (4096, 4, 1.295),
    (512, 5, 1.425),
    (0, 6, 1.570),
)
_MARGIN = 4.5
_MIN_PARTITION = 32
MAX_HASHES = 6


@dataclass(frozen=True, kw_only=True)
class SketchLayout:
    """Static shape of the sketch of one shard.

    Attributes:
        numel: number of elements of the segment in a shard.
        symbol: format of a group.
        keys: number of distinct present groups that the table is sized for.
        hashes: number of cells per key (1 if ``direct``).
        partition: number of cells of one partition.
    """

    numel: int
    symbol: Symbol
    keys: int
    hashes: int
    partition: int

    @cached_property
    def groups(self) -> int:
        """Groups in the shard; the last one may be partly padding."""
        return -(-self.numel // self.symbol.lanes)

    @cached_property
    def words(self) -> int:
        """32-bit words of the bitmap, one bit per group."""
        return -(-self.groups // 32)

    @cached_property
    def index_words(self) -> int:
        """Words of the index as sent: the bitmap, then one poison word (non-finite input)."""
        return self.words + 1

    @cached_property
    def cells(self) -> int:
        """32-bit cells of the table."""
        return self.hashes * self.partition

    @cached_property
    def direct(self) -> bool:
        """Whether key ``k`` owns cell ``k`` alone (no hashing, no peeling)."""
        return self.hashes == 1


def plan_layout(numel: int, symbol: Symbol, keys: int) -> SketchLayout:
    """Layout for up to ``keys`` distinct present groups among ``numel`` elements.

    Raises:
        ValueError: if ``numel`` or ``keys`` is negative, or there are 2**31 groups or more.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if keys < 0:
        raise ValueError(f"keys must not be negative, got {keys}")
    groups = -(-numel // symbol.lanes)
    if groups >= 1 << 31:
        raise ValueError(f"a sketch holds fewer than 2**31 groups, got {groups}")
    keys = min(keys, groups)
    hashes, partition = _table(keys)
    if hashes * partition >= groups:
        hashes, partition = 1, groups
    return SketchLayout(numel=numel, symbol=symbol, keys=keys, hashes=hashes, partition=partition)


def _table(keys: int) -> tuple[int, int]:
    """Number of hashes, and cells of a partition, of a table for ``keys`` keys."""
    hashes, threshold = next((h, t) for least, h, t in _HASHES_BY_KEYS if keys >= least)
    cells = threshold * keys + _MARGIN * math.sqrt(keys)
    return hashes, max(_MIN_PARTITION, math.ceil(cells / hashes))


# Columns of the `counts` that selecting operators write, [W, 4] int32.
ABOVE, NONZERO, KEPT, SATURATED = range(4)
COUNTS = 4
# Entries of the `stats` that `decode` writes, [2] int32.
UNION, UNRESOLVED = 0, 1


class SketchOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before.

    Shapes: ``W`` destination ranks, ``n`` elements of the segment in one shard. Only the last
    dimension of a two-dimensional argument needs unit stride.
    """

    def encode(
        self,
        grad: Tensor,
        residual: Tensor | None,
        threshold: Tensor,
        step: Tensor,
        seed: Tensor,
        index: Tensor,
        cells: Tensor,
        counts: Tensor,
        *,
        layout: SketchLayout,
        levels: int,
        capacity: int,
        support: Tensor | None = None,
    ) -> None:
        """Accumulate, select, quantize and sketch one segment for every destination.

        Per destination ``d`` with ``x = float32(grad[d]) + float32(residual[d])``:

        1. Without a ``support``, a group is selected if its largest ``|x|`` is at least
           ``threshold[d]``. If more than ``capacity`` groups are selected, the largest are kept,
           ties to the lower index. A capacity for all groups selects every non-zero group. With a
           ``support``, exactly its groups are selected, even zero ones; threshold and capacity do
           not matter.
        2. A group with a non-finite ``x`` is never selected, its residual stays as it was, and the
           poison word of the destination is set.
        3. A kept element sends ``q = rint(clip(x / step[d], -levels, levels))`` and leaves
           ``x - q * step[d]`` in the residual. Every other element leaves ``x``. Both are rounded
           to nearest even in the residual's dtype (finite stays finite).

        Args:
            grad: ``[W, n]`` float32, bfloat16 or float16.
            residual: ``[W, n]`` float32 or bfloat16, updated in place; None for no feedback.
            threshold: ``[W]`` float32, positive.
            step: ``[W]`` float32 powers of two, so that ``q * step`` and ``x / step`` are exact
                and ``x - q * step`` is exact in float32 for ``|x| < 2**24 * step``.
            seed: ``[1]`` int32, the hash seed of this step.
            index: ``[W, index_words]`` int32, written: bitmaps (bit ``g % 32`` of word ``g // 32``
                for group ``g``), then the poison word (0 or 1).
            cells: ``[W, cells]`` int32, written.
            counts: ``[W, 4]`` int32, written: finite groups above the threshold, finite groups
                that are not all zero, groups kept, kept groups with a clipped element.
            support: ``[W, words]`` int32 bitmaps (bits past the last group are ignored), or None.
        """
        ...

    def decode(
        self,
        index: Tensor,
        cells: Tensor,
        step: Tensor,
        seed: Tensor,
        out: Tensor,
        residual: Tensor | None,
        stats: Tensor,
        *,
        layout: SketchLayout,
        divisor: int,
    ) -> None:
        """OR the bitmaps, peel the summed cells and write this rank's shard of the gradient.

        Elements are ``float32(sum of q) * step / divisor``, rounded to ``out``'s dtype; absent
        groups are zero. If any poison word is set, all of ``out`` is NaN. Groups that peeling
        cannot recover are zero and counted, and their estimate is added to ``residual``: the mean
        over their cells of the cell's remaining sum, shared equally among the cell's remaining
        keys, and not divided by ``divisor``.

        Args:
            index: ``[W, index_words]`` int32, the index that each rank sent to this one.
            cells: ``[cells]`` int32, the sum over ranks; may be overwritten.
            step: ``[1]`` float32, the quantization step of this shard.
            seed: ``[1]`` int32, as in :meth:`encode`.
            out: ``[n]`` float32, bfloat16 or float16, written.
            residual: ``[n]`` this rank's residual of its own shard, or None.
            stats: ``[2]`` int32, written: groups in the union, groups unresolved.
        """
        ...

    def select(
        self,
        x: Tensor,
        threshold: Tensor,
        bitmap: Tensor,
        counts: Tensor,
        *,
        layout: SketchLayout,
        capacity: int,
    ) -> None:
        """Mark the groups of every row that :meth:`encode` would keep without a support.

        Args:
            x: ``[R, n]`` float32 or bfloat16.
            threshold: ``[R]`` float32, positive.
            bitmap: ``[R, words]`` int32, written.
            counts: ``[R, 4]`` int32, written as by :meth:`encode`; the last column is 0.
        """
        ...

    def insert(
        self, symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
    ) -> None:
        """Sketch given symbols: ``cells`` get the sums over the groups in ``index``.

        Args:
            symbols: ``[groups]`` int32; entries of absent groups are ignored.
            index: ``[words]`` int32 bitmap.
            seed: ``[1]`` int32.
            cells: ``[cells]`` int32, written.
        """
        ...

    def peel(
        self, cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
    ) -> tuple[Tensor, Tensor]:
        """Recover the summed symbols of the groups in ``index``.

        Returns:
            ``[groups]`` int32 symbols (0 where absent or unresolved) and ``[groups]`` bool, True
            where a present group could not be recovered.
        """
        ...
