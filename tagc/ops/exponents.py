"""Wire format of packed exponents: bfloat16 elements of any bits, to the bit, mostly in 12.25 bits.

A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. Neighbours have similar exponents, so a
block of 64 elements sends one exponent ``top`` in a byte, and of each element a code of 4 bits and
a byte with its sign (bit 7) and mantissa. The code of an element with the exponent ``e`` is

- 14 if ``e`` is 0: zeros of both signs and subnormal numbers;
- ``top - e`` if that is 0 to 13;
- 15 otherwise: an *exception*, whose ``e`` is in the spare bytes of its chunk.

``top`` is the largest exponent of the block. But if ``mean + 4`` has fewer exceptions, as in a
block with one very large number, it is that: ``mean`` is the average exponent of the elements with
``e`` above 0, rounded down.

64 blocks, 4096 elements, form a chunk. The spare bytes of a chunk are as many as its blocks. They
have the exponents of its exceptions in the order of the elements, then zeros.

If any chunk has more exceptions than spare bytes, the row travels as it is, in a longer message. So
a message has one of two lengths, and its first word says which:

- ``[0 | 3 zeros | bytes | codes | tops | spare]``, ``words`` of int32: 64 bytes with sign and
  mantissa for each block; then 32 bytes with codes for each block, byte ``k`` with the code of
  element ``k`` of the block in its lower half and of element ``k + 32`` in its upper half; then a
  byte for each block's top; then the spare bytes of all chunks. Elements that the last block lacks
  count as 0.
- ``[1 | 3 zeros | elements]``, ``raw_words`` of int32, two elements a word, the first in the low
  half.

Byte ``i`` of a message is byte ``i % 4`` of word ``i // 4``, the lowest first. Both lengths are
multiples of 16 bytes, filled up with zeros.

Example: a row of the elements 1.0 (0x3F80, exponent 127), -0.75 (0xBF40, 126), 0.0 and 1e-6
(0x3586, 107). The largest exponent, 127, leaves one exception, and 120 + 4 would leave three, so
``top`` is 127. The codes are 0, 1, 14, 15, the bytes 0x00, 0xC0, 0x00, 0x06; the 60 elements that
are missing have code 14 and byte 0x00. So the message is 16 bytes of zeros, the bytes
0x00, 0xC0, 0x00, 0x06 and 60 zeros, the codes 0xE0, 0xE1, 0xEE, 0xEF and 28 times 0xEE, the top
0x7F, the spare byte 107, and 14 zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

BLOCK = 64
"""Elements of a block."""
CHUNK = 64
"""Blocks of a chunk."""
ZERO, EXCEPTION = 14, 15
"""The codes that are no difference to ``top``."""
ABOVE_MEAN = 4
"""What ``top`` is above the mean exponent, unless it is the largest."""
BITS = 8 * (BLOCK + BLOCK // 2 + 2) / BLOCK
"""Bits of an element in the shorter message, without its head."""
HEAD = 4
"""int32 words before the elements."""


@dataclass(frozen=True, kw_only=True)
class ExponentLayout:
    """Static shape of a message.

    Attributes:
        numel: number of elements of a row.
    """

    numel: int

    @cached_property
    def blocks(self) -> int:
        """Number of blocks; the last one is padded."""
        return -(-self.numel // BLOCK)

    @cached_property
    def words(self) -> int:
        """int32 words of a packed message."""
        return HEAD + _whole(self.blocks * (BLOCK + BLOCK // 2 + 2))

    @cached_property
    def raw_words(self) -> int:
        """int32 words of a message with the row as it is, never fewer than ``words``."""
        return max(HEAD + _whole(2 * self.numel), self.words)


def _whole(size: int) -> int:
    """Words of so many bytes, a multiple of 16 bytes."""
    return -(-size // 16) * 4
