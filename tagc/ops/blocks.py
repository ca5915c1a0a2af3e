"""Wire format of block-quantized elements: a scale per block, then codes of a few bits each.

A block of ``block`` elements with largest magnitude ``m`` has the scale ``s = bfloat16(m / L)``,
where ``L = 2**(bits - 1) - 1`` is the largest code, and element ``x`` the code ``q = rint(x / s)``
in two's complement, clipped to ``[-L, L]``. A scale of 8 significant bits makes every product
``q * s`` exact in float32, so ``x - q * s`` is also exact (Sterbenz), on every device, with or
without fused multiply-add. A finer scale would gain nothing, because the residual keeps the
quantization error.

Without a residual, codes can be *dithered*: ``q = rint(x / s + v)`` with ``v`` between -1/2 and
1/2, so that ``q * s`` is ``x`` on average. ``v`` is a hash of the element's place and of the row's
seed, which makes runs repeatable on every device.

A message is ``[scale words | code words]`` of int32. Two scales share a word, the even one in the
low half. Element ``i * m + j`` of a block, with ``m = block * bits / 32`` words, has its code in
bits ``[bits * i, bits * (i + 1))`` of the block's word ``j``. Neighbours lie in neighbouring words,
so packing needs no shuffles on a CPU and coalesces on a GPU. Example with ``bits=8, block=8``
(``m = 2``): word 0 holds elements 0, 2, 4, 6 and word 1 elements 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

BITS = (4, 8)
MIN_BLOCK, MAX_BLOCK = 32, 4096
# Blocks with a smaller scale send zeros, because the scale's inverse must be finite.
MIN_SCALE = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Static shape of a message.

    Attributes:
        numel: number of elements; the last block may be partly padding.
        bits: bits of a code, one of ``BITS``.
        block: number of elements that share a scale, a power of two within the bounds above.
    """

    numel: int
    bits: int
    block: int = 256

    @cached_property
    def levels(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def blocks(self) -> int:
        """Number of blocks; the last one is padded."""
        return -(-self.numel // self.block)

    @cached_property
    def scale_words(self) -> int:
        """int32 words of the scales."""
        return -(-self.blocks // 2)

    @cached_property
    def block_words(self) -> int:
        """int32 words of one block's codes."""
        return self.block * self.bits // 32

    @cached_property
    def words(self) -> int:
        """int32 words of a message."""
        return self.scale_words + self.blocks * self.block_words
