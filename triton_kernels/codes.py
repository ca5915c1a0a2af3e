"""Codes: quantize a tile of blocks, and read codes back. The format is :mod:`tagc.ops.blocks`'.

A block's scale is ``s = bfloat16(m / levels)`` for its largest magnitude ``m``, a code
``q = rint(clip(x * (1 / s), -levels, levels))``, and what a code leaves is ``x - q * s``. The
reciprocal is an IEEE division (a GPU's plain ``/`` is approximate); ``q * s`` is exact.

Worked example (bits 4, levels 7): m = 3.5 gives s = 0.5; x = (-3.5, 0.8, 0.25) has the codes
(-7, 2, 0) and leaves (0, -0.2, 0.25).
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import bfloat16_bits, magnitude, rint


def blocks_and_warps(block: int, each: int = 16) -> tuple[int, int]:
    """Blocks per program, and its warps, for blocks of ``block`` elements, ``each`` per thread.

    One warp, as long as a block fits: reductions over a block then are shuffles.
    """
    tile = 32 * each
    return max(1, tile // block), max(1, block // tile)


@jit
def quantize_tile(x, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize ``[BLOCKS, BLOCK]`` float32.

    Returns:
        bits of the scales ``[BLOCKS]`` int16; words of the codes ``[BLOCKS, block_words]`` int32;
        what the codes leave ``[BLOCKS, BLOCK]`` float32; whether blocks are finite ``[BLOCKS]``.
    """
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // LANES
    largest = tl.max(magnitude(x), 1)
    finite = largest < 0x7F800000
    scale = bfloat16_bits(largest.to(tl.float32, bitcast=True) * (1.0 / LEVELS))
    scale = tl.where(finite & (scale >= 0x80), scale, 0)  # 0x80 is MIN_SCALE
    s = (scale << 16).to(tl.float32, bitcast=True)
    one = tl.full(s.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(scale != 0, s, one))
    q = rint(tl.minimum(tl.maximum(x * inverse[:, None], -LEVELS), LEVELS))
    q = tl.where(scale[:, None] != 0, q, 0.0)
    left = x - q * s[:, None]
    code = q.to(tl.int32).to(tl.uint32, bitcast=True) & ((1 << BITS) - 1)
    shift = (tl.arange(0, LANES) * BITS).to(tl.uint32)
    lanes = tl.reshape(code, [BLOCKS, LANES, WORDS]) << shift[None, :, None]
    words = tl.sum(lanes, 1).to(tl.int32, bitcast=True)
    scale = tl.where(finite, scale, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)
    return scale, words, left, finite


@jit
def store_message(
    scales, codes, scale, words, first, blocks, BLOCKS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Store what :func:`quantize_tile` made of the blocks from ``first`` into a row's message.

    Args:
        scales: first scale of the row, int16; their number is ``blocks`` rounded up to even.
        codes: first code word of the row.
    """
    b = tl.arange(0, BLOCKS)
    tl.store(scales + first + b, scale, mask=b < blocks + blocks % 2 - first)
    place = codes + first * WORDS + (b[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    tl.store(place, words, mask=b[:, None] < blocks - first)


@jit
def scale_of(half):
    """float32 scale of its int16 bits."""
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def code_of(word, lane, BITS: tl.constexpr):
    """Code of a lane of an int32 word, as float32."""
    return ((word << (32 - BITS - lane * BITS)) >> (32 - BITS)).to(tl.float32)
