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
from typing import Protocol

from torch import Tensor

BITS = (4, 8)
MIN_BLOCK, MAX_BLOCK = 32, 4096
# Blocks with a smaller scale send zeros, because the scale's inverse must be finite.
MIN_SCALE = 2.0**-126


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Static shape of a message.

    Attributes:
        numel: number of elements; the last block may be partly padding.
        bits: bits of a code.
        block: number of elements that share a scale, a power of two.
    """

    numel: int
    bits: int
    block: int = 256

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"numel must not be negative, got {self.numel}")
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {self.bits}")
        if not MIN_BLOCK <= self.block <= MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(
                f"block must be a power of two in [{MIN_BLOCK}, {MAX_BLOCK}], got {self.block}"
            )

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


class BlockOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before. Rows need unit stride only in
    their last dimension; messages may be slices of wider buffers."""

    def quantize(
        self,
        grad: Tensor,
        residual: Tensor | None,
        message: Tensor,
        *,
        layout: BlockLayout,
        average: float,
        dither: Tensor | None = None,
    ) -> None:
        """Accumulate and quantize rows; the residual keeps the quantization error.

        Per block of ``x = float32(grad) + float32(residual)`` with largest magnitude ``m``:

        1. The scale is ``s = bfloat16(m * float32(1 / levels))``, rounded to nearest even. With
           ``dither`` it is rounded up, except that a ``m * float32(1 / levels)`` which exceeds a
           bfloat16 by at most 2 units in the last place is rounded down to it. The scale is at most
           the largest finite bfloat16, 0 if it would be below ``MIN_SCALE``, and NaN (0x7FC0) if
           ``m`` is not finite. A block with a NaN scale has codes 0, and its residual stays as it
           was.
        2. Codes are ``q = rint(clip(x * (1 / s), -levels, levels))``, 0 where ``s`` is 0. With
           ``dither`` they are ``rint(clip(...) + v)``, where element ``j`` of a row with the seed
           ``d`` has ``v = (h + 1/2) / 2**16 - 1/2`` (exact), and ``h`` is the lower half of
           ``fmix32((j >> 1) ^ fmix32(d))`` if ``j`` is even, else the upper half (``fmix32`` is
           MurmurHash3's finalizer). Then ``q * s`` is ``x`` on average: with the scale rounded up,
           clipping removes only what rounding adds, at most ``2**-21`` of ``x``, and what exceeds
           the largest bfloat16.
        3. With ``left = x - q * s`` (exact), the residual becomes ``left`` if ``average`` is 0,
           else ``float32(average) * residual + float32(1 - average) * left`` (three roundings, no
           fused multiply-add), rounded to nearest even in its dtype (finite stays finite).

        Args:
            grad: ``[R, numel]`` float32, bfloat16 or float16.
            residual: ``[R, numel]`` float32 or bfloat16, updated in place; None for no feedback.
            message: ``[R, words]`` int32, written; padding in codes and scales is 0.
            average: share of the old residual that stays, in [0, 1); LoCo's beta.
            dither: ``[R]`` int32, a seed for each row, only without a residual; None rounds to
                nearest.
        """
        ...

    def dequantize(
        self,
        message: Tensor,
        out: Tensor,
        *,
        layout: BlockLayout,
        divisor: int,
        add: bool = False,
    ) -> None:
        """Add up messages: ``out[k] = (sum over r of q * s) / divisor``.

        Products are exact in float32; they are added in float32 in the order of ``r``, starting
        from the first, then divided (IEEE), then rounded to ``out``'s dtype. A NaN scale makes
        its whole block NaN.

        Args:
            message: ``[K, R, words]`` int32.
            out: ``[K, numel]`` float32, bfloat16 or float16, written.
            add: whether the quotient is added to what ``out`` holds, in float32, and the sum
                rounded once.
        """
        ...
