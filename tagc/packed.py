"""Wire format of a packed sparse vector: which groups are there, then their elements.

A message is ``[header | index | values]`` of int32, of a size that only the layout decides, so
that it travels without a word about its length:

* **header**: the poison word (1 if any element was not finite, else 0) and the number of groups
  kept, ``K <= capacity``.
* **index**, whichever is smaller. *Bitmap*: bit ``g % 32`` of word ``g // 32`` for group ``g``.
  *Elias-Fano*: the kept groups ``g_0 < g_1 < ...`` split into ``low_bits`` low bits, stored one
  after the other (``low_bits`` divides 32, so none straddles words; entry ``i`` at bit
  ``i * low_bits``), and the rest ``h_i``, stored in unary: bit ``h_i + i`` of the high bitmap is
  set. That is ``2 + log2(1 / density)`` bits a key, within half a bit of the entropy.
* **values**: the elements of the kept groups, one group after the other, block-quantized as
  :class:`tagc.blocks.BlockLayout` says (elements past the vector's end, and places past ``K``
  groups, are zeros).

Example: groups 3, 9 and 10 of 16, ``low_bits=2``: low parts 3, 1, 2, and high parts 0, 2, 2 give
the high bits 0, 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tagc.blocks import BlockLayout

HEADER = 2
POISON, KEPT_GROUPS = 0, 1
_LOW_BITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Static shape of the message for one shard.

    Attributes:
        numel: elements of the shard segment.
        group: elements that are kept or left together, a power of two.
        capacity: groups that fit.
        low_bits: bits of a key stored as they are; 0 for a bitmap.
        values: shape of the values.
    """

    numel: int
    group: int
    capacity: int
    low_bits: int
    values: BlockLayout

    @property
    def groups(self) -> int:
        """Groups in the shard; the last one may be partly padding."""
        return -(-self.numel // self.group)

    @property
    def bitmap_words(self) -> int:
        """Words of a bitmap over the groups, whether or not it travels."""
        return -(-self.groups // 32)

    @cached_property
    def low_words(self) -> int:
        """Words of the low parts; 0 for a bitmap."""
        return -(-self.capacity * self.low_bits // 32)

    @cached_property
    def high_words(self) -> int:
        """Words of the high bitmap of Elias-Fano, or of the bitmap."""
        if not self.low_bits:
            return self.bitmap_words
        highest = max(0, self.groups - 1) >> self.low_bits
        return -(-(self.capacity + highest) // 32)

    @property
    def index_words(self) -> int:
        """Words of the index: low parts, then high bitmap (or the bitmap alone)."""
        return self.low_words + self.high_words

    @property
    def words(self) -> int:
        """int32 words of a message."""
        return HEADER + self.index_words + self.values.words


def plan_packed(
    numel: int, *, capacity: int, group: int = 1, bits: int = 8, block: int = 256
) -> PackedLayout:
    """The smallest message for ``capacity`` groups among ``numel`` elements.

    Raises:
        ValueError: if an argument is out of range, or there are 2**31 groups or more.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if group not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"group must be a power of two up to 32, got {group}")
    groups = -(-numel // group)
    if groups >= 1 << 31:
        raise ValueError(f"a message holds fewer than 2**31 groups, got {groups}")
    if not 0 <= capacity <= groups:
        raise ValueError(f"capacity must be in [0, {groups}], got {capacity}")
    values = BlockLayout(numel=capacity * group, bits=bits, block=block)
    # The bitmap comes first, so it wins ties.
    return min(
        (
            PackedLayout(numel=numel, group=group, capacity=capacity, low_bits=low, values=values)
            for low in (0, *_LOW_BITS)
        ),
        key=lambda layout: layout.index_words,
    )
