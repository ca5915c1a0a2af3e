"""Codes: quantize a tile of blocks, and read codes back. The format is :mod:`tagc.ops.blocks`'.

A block's scale is ``s = bfloat16(m / levels)`` for its largest magnitude ``m``, a code
``q = rint(clip(x * (1 / s), -levels, levels))``, and what a code leaves is ``x - q * s``. The
reciprocal is an IEEE division (a GPU's plain ``/`` is approximate); ``q * s`` is exact.

Worked example (bits 4, levels 7): m = 3.5 gives s = 0.5; x = (-3.5, 0.8, 0.25) has the codes
(-7, 2, 0) and leaves (0, -0.2, 0.25).
"""

from __future__ import annotations

from .jit import constant, jit, tl
from .scalar import bfloat16_bits, fmix32, magnitude

# Added to a float32 below 2**22, its integer is in the lowest bits.
_INTEGER = constant(1.5 * 2**23)
_HALF_STEP = constant(2.0**-17)  # of a dither


def blocks_and_warps(block: int, each: int = 16) -> tuple[int, int]:
    """Blocks per program, and its warps, for blocks of ``block`` elements, ``each`` per thread.

    One warp, as long as a block fits: reductions over a block then are shuffles.
    """
    tile = 32 * each
    return max(1, tile // block), max(1, block // tile)


@jit
def dither_at(place, salt):
    """What is added to the codes at places of a row (uint32) before they are rounded, float32;
    ``salt`` is the hash of the row's seed."""
    h = fmix32(place ^ salt) >> 16
    return ((h + h).to(tl.int32) - 65535).to(tl.float32) * _HALF_STEP


@jit
def quantize_tile(
    x, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, dither=None
):  # fmt: skip
    """Quantize ``[BLOCKS, BLOCK]`` float32.

    Args:
        dither: of :func:`dither_at`, ``[BLOCKS, BLOCK]``; None to round to nearest.

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
    y = tl.minimum(tl.maximum(x * inverse[:, None], -LEVELS), LEVELS)
    if dither is not None:
        y += dither
    # Rounded to nearest even by what a float32 has no bits for; the lowest bits are the code then,
    # in two's complement.
    rounded = y + _INTEGER
    code = rounded.to(tl.uint32, bitcast=True) & ((1 << BITS) - 1)
    left = x - (rounded - _INTEGER) * s[:, None]
    # A code of minus zero, which x = -0 has where there is a scale, leaves +0; this one is +0. To
    # add minus zero changes nothing; spelled in bits, since Triton before 3.9 takes -0.0 for 0.
    minus_zero = tl.full(scale.shape, -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    left += tl.where(scale != 0, 0.0, minus_zero)[:, None]
    shift = (tl.arange(0, LANES) * BITS).to(tl.uint32)
    lanes = tl.reshape(code, [BLOCKS, LANES, WORDS]) << shift[None, :, None]
    words = tl.sum(lanes, 1).to(tl.int32, bitcast=True)
    words = tl.where(scale[:, None] != 0, words, 0)
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


@jit
def codes_of(words, mask, BITS: tl.constexpr):
    """Codes of int32 words ``[N, WORDS]``, as float32 ``[N, LANES, WORDS]``.

    Codes of few bits need no shift and no conversion each: a float32 with the exponent ``23 - p``
    counts in units of its bit ``p``, so a code becomes a part of its mantissa where it is in the
    word, and what the exponent stands for is subtracted, exactly. In two's complement, a code with
    its sign bit flipped is the code plus half its span. Lanes too high for a mantissa's 23 bits
    come down together.

    Args:
        mask: int32 scalar ``(1 << BITS) - 1``, an argument of the kernel. Were it a constant, every
            use of it in a loop would be an instruction more.
    """
    LANES: tl.constexpr = 32 // BITS
    LOW: tl.constexpr = 23 // BITS  # lanes that fit
    lane = tl.arange(0, LANES)[None, :, None]
    if BITS >= 8:
        return code_of(words[:, None, :], lane, BITS)
    else:
        down = (lane // LOW) * (LOW * BITS)
        place = lane * BITS - down
        moved = words[:, None, :].to(tl.uint32, bitcast=True) >> down.to(tl.uint32)
        code = moved & (mask.to(tl.uint32, bitcast=True) << place.to(tl.uint32))
        exponent = (127 + 23 - place) << 23
        half = 1 << (place + BITS - 1)
        m = (code ^ (exponent + half).to(tl.uint32)).to(tl.float32, bitcast=True)
        return m - ((1 << (23 - place)) + (1 << (BITS - 1))).to(tl.float32)
