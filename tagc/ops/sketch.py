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
