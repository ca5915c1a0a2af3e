"""Wire format of exact changes: 16-bit floats that a receiver knows become new ones, to the bit.

Between two optimizer steps a bfloat16 or float16 parameter moves by few units in the last place,
or not at all. Bit patterns ``k`` are numbered in order, ``order(k) = k`` for positive numbers and
``~(k & 0x7FFF)`` for negative ones; then ``q = order(new) - order(old)`` modulo 2**16 and
``z = 2 * q`` or, for a negative ``q``, ``-2 * q - 1``. Every pattern has a number, so NaNs,
infinities and zeros of both signs travel as they are.

An update has about the same size for all elements of a tensor, so ``z`` is the larger the smaller
the unit in the last place is. Both sides know ``old``, so its exponent says how many bits ``z``
gets. The *class* of an element is its tensor, a span of columns, and the exponent of ``old`` modulo
32. (A tensor seldom has exponents that are 32 apart, and then they only share widths.) The sender
chooses two widths for every class, ``b1`` and ``b2``, 0 to 15 bits:

- Level 1 has ``b1`` bits for each element of the class: ``z``, or ones if it is at least
  ``2**b1 - 1``: the element is *escaped*.
- If ``b1`` is 0, changed elements of the class are escaped, and a list has their places.
- Level 2 has ``b2`` bits for each escaped element: ``z``, or ones if it is at least ``2**b2 - 1``.
- Level 3 has the 16 bits of each ``z`` that is ones in level 2.

Elements are coded in independent blocks of at most ``block`` elements of one span. Bit ``i`` of a
block is bit ``i % 32`` of its word ``i // 32``. A block of ``m`` elements consists of

1. level 1 of its elements, then level 2, then level 3 of those that level 1 escapes, each in order;
2. if it has elements with ``b1 = 0``: how many of them, ``n``, are changed, in as many bits as the
   number ``m`` has; their places in ascending order, as an Elias-Fano code, and then levels 2 and 3
   of these elements. With the largest ``l`` for which ``n * 2**l <= m``, the code has a bit for
   each of ``n + (m - 1 >> l)`` numbers, in which bit ``(place >> l) + i`` is set for the ``i``-th
   place, and then the lower ``l`` bits of each place;

and ends with zeros up to a whole word. It has no words if only a list is possible, and it is empty.

A message is ``[total | masks | widths | sizes | blocks]`` of int32. ``total`` counts all its words.
If it is 1, nothing has changed, and nothing follows. If it is ``1 + raw_words``, ``new`` follows as
it is, two elements a word, the first in the low half; a row is coded only if that is smaller.
``masks`` has a word for every span; bit ``c`` is set if class ``c`` of the span has widths other
than 0 and 0. ``widths`` has a byte for each of these classes, ``b1 | b2 << 4``, and ``sizes`` the
number of words of each block, in 16 bits; the first are in the lowest bits of a word.

Example: of 64 bfloat16 elements, all 1.0 (exponent 127, class 31), element 5 becomes the next
larger number (``z = 2``), and element 40 the next smaller one (``z = 1``). The widths are 0 and 2.
The block has ``n = 2`` in 7 bits; ``l = 5``, bits for 3 numbers, of which bits 0 and ``1 + 1`` are
set, 101; the lower bits 5 and ``40 - 32 = 8``, 5 bits each; in level 2 the values 2 and 1, 2 bits
each: 24 bits. The message is 5 (total), ``1 << 31`` (mask), 0x20 (widths), 1 (size), and
``2 | 5 << 7 | 5 << 10 | 8 << 15 | 2 << 20 | 1 << 22`` (the block), where ``new`` has 32 words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

CLASSES = 32
"""Classes of a span."""
MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
"""Bits below the exponent, by dtype."""


@dataclass(frozen=True, kw_only=True)
class ExactLayout:
    """Static shape of a row and its messages.

    Attributes:
        spans: elements of each span, in the order of the row; a span is a parameter's slice.
        dtype: bfloat16 or float16.
        block: the largest number of elements of a block, a power of two from 32 to 2048.
    """

    spans: tuple[int, ...]
    dtype: torch.dtype
    block: int = 1024

    def __post_init__(self) -> None:
        if sum(self.spans) >= 1 << 31:
            raise ValueError(f"spans must have fewer than 2**31 elements, got {sum(self.spans)}")

    @cached_property
    def numel(self) -> int:
        """Number of elements of a row."""
        return sum(self.spans)

    @cached_property
    def blocks(self) -> int:
        """Number of blocks; the last one of a span may be short."""
        return sum(-(-size // self.block) for size in self.spans)

    @cached_property
    def raw_words(self) -> int:
        """int32 words of a row as it is."""
        return -(-self.numel // 2)

    @cached_property
    def words(self) -> int:
        """int32 words that every message fits in."""
        return 1 + self.raw_words

    @cached_property
    def tables(self) -> int:
        """Entries of all spans' tables of widths."""
        return CLASSES * len(self.spans)

    @cached_property
    def plan_words(self) -> int:
        """int32 words of a plan, see :func:`tagc.ops.reference.measure_exact`."""
        return 1 + self.tables + self.blocks
