"""Codes: quantize a tile of blocks, and read codes back. :mod:`tagc.ops.blocks` has the format.

A block with the largest magnitude ``m`` has the scale ``s = bfloat16(m / levels)``. A code is
``q = rint(x * (1 / s))``, clipped if it can exceed ``levels``, and leaves ``x - q * s``. The
reciprocal is an IEEE division (a GPU's plain ``/`` is approximate); ``q * s`` is exact.

Worked example (bits 4, levels 7): m = 3.5 gives s = 0.5; x = (-3.5, 0.8, 0.25) has the codes
(-7, 2, 0) and leaves (0, -0.2, 0.25).
"""

from __future__ import annotations

from .jit import constant, jit, tl
from .scalar import bfloat16_bits, fmix32, magnitude

# Added to a float32 below 2**22, it leaves the rounded integer in the lowest bits.
_INTEGER = constant(1.5 * 2**23)
_INTEGER_BITS = constant(0x4B400000)
# Elements of a thread: some neighbours in each of the lanes that share its words.
_EACH = 32


def blocks_and_warps(block: int) -> tuple[int, int]:
    """Blocks and warps per program, for blocks of ``block`` elements.

    A program has one warp if a block fits, so that reductions over a block are shuffles.
    """
    tile = 32 * _EACH
    return max(1, tile // block), max(1, block // tile)


@jit
def dither_of(pair, salt):
    """Offsets to add to codes before they are rounded, float32 ``[N, M, 2 * K]``.

    Args:
        pair: uint32 ``[N, M, K]``: half the place in the row of each pair of neighbours, which
            share a hash.
        salt: hash of the row's seed.
    """
    h = fmix32(pair ^ salt)
    # 16 bits plus half a unit after the exponent of 1: a number from 1 to 2, exactly.
    low = ((h << 7) & 0x7FFF80) | 0x3F800040
    high = ((h >> 9) & 0x7FFF80) | 0x3F800040
    both = tl.reshape(tl.join(low, high), [h.shape[0], h.shape[1], 2 * h.shape[2]])
    return both.to(tl.float32, bitcast=True) - 1.5


@jit
def _scale_bits(m, DITHERED: tl.constexpr):
    """Bits (uint32) of the bfloat16 scale of float32 ``m``; rounded up if codes are dithered."""
    if DITHERED:
        up = (m.to(tl.uint32, bitcast=True) + 0xFFFD) >> 16
        return tl.minimum(up, 0x7F7F)  # the largest
    else:
        return bfloat16_bits(m)


@jit
def quantize_tile(x, BITS: tl.constexpr, dither=None):
    """Quantize blocks.

    Args:
        x: parts of the blocks' lanes, front to back: a tuple of float32 ``[BLOCKS, PART, WORDS]``.
            A thread combines the codes of parts.
        dither: offsets from :func:`dither_of`, a tuple like ``x``; None to round to nearest.

    Returns:
        Bits of the scales ``[BLOCKS]`` int16; words of the codes ``[BLOCKS, WORDS]`` int32;
        quantization errors, a tuple like ``x``; whether blocks are finite ``[BLOCKS]``.
    """
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    # Otherwise the scale's rounding, by up to 2**-8, takes no code past the last one.
    CLIP: tl.constexpr = dither is not None and BITS != 4
    PART: tl.constexpr = x[0].shape[1]
    # A code's float32 plus _INTEGER, read as an integer, is a constant plus the code. The sum of
    # these, each times its lane's unit, is a sum of constants and of codes made positive by half
    # their span, which have no carries. Adding half the span flips the sign bit.
    ONES: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1)  # a 1 in every lane
    SIGNS: tl.constexpr = ONES << (BITS - 1)
    CONSTANT: tl.constexpr = (SIGNS - _INTEGER_BITS * ONES) & 0xFFFFFFFF
    largest = magnitude(x[0])
    for k in tl.static_range(1, len(x)):
        largest = tl.maximum(largest, magnitude(x[k]))
    largest = tl.max(tl.max(largest, 2), 1)
    finite = largest < 0x7F800000
    scale = _scale_bits(largest.to(tl.float32, bitcast=True) * (1.0 / LEVELS), dither is not None)
    scale = tl.where(finite & (scale >= 0x80), scale, 0)  # 0x80 is MIN_SCALE
    s = (scale << 16).to(tl.float32, bitcast=True)
    one = tl.full(s.shape, 1.0, tl.float32)
    inverse = tl.div_rn(one, tl.where(scale != 0, s, one))
    # A code of minus zero, which x = -0 has in a block with a scale, leaves +0; rounded by an
    # addition it is +0. Adding minus zero changes nothing. It is written in bits because Triton
    # before 3.9 reads -0.0 as 0.
    minus_zero = tl.full(scale.shape, -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    zero = tl.where(scale != 0, 0.0, minus_zero)
    total = tl.full([1, 1], CONSTANT, tl.uint32)
    left = ()
    for k in tl.static_range(len(x)):
        y = x[k] * inverse[:, None, None]
        if CLIP:
            y = tl.minimum(tl.maximum(y, -LEVELS), LEVELS)
        if dither is not None:
            y += dither[k]
        # The addition rounds to nearest even: the float32 has no bits for the fraction.
        rounded = y + _INTEGER
        unit = tl.full([PART], 1, tl.uint32) << (tl.arange(0, PART) * BITS).to(tl.uint32)
        unit <<= k * PART * BITS
        total += tl.sum(rounded.to(tl.uint32, bitcast=True) * unit[None, :, None], 1)
        left += (x[k] - (rounded - _INTEGER) * s[:, None, None] + zero[:, None, None],)
    words = (total ^ SIGNS).to(tl.int32, bitcast=True)
    words = tl.where(scale[:, None] != 0, words, 0)
    scale = tl.where(finite, scale, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)
    return scale, words, left, finite


@jit
def store_message(
    scales, codes, scale, words, first, blocks, BLOCKS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Store the results of :func:`quantize_tile` for the blocks from ``first`` in a row's message.

    Args:
        scales: first scale of the row, int16; there are ``blocks`` of them, rounded up to even.
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
def codes_at(words, mask, LANE: tl.constexpr, BITS: tl.constexpr):
    """Codes of one lane of int32 words, as float32.

    This needs no shift and no conversion per code. A float32 with the exponent ``23 - p`` counts in
    units of its bit ``p``. So a code becomes part of a mantissa at its place in the word, and the
    value of the exponent is subtracted, exactly. In two's complement, a code with its sign bit
    flipped is the code plus half its span. Lanes too high for a mantissa's 23 bits are shifted down
    together.

    Args:
        mask: int32 scalar ``(1 << BITS) - 1``, an argument of the kernel. As a constant, it would
            cost one more instruction for every use in a loop.
    """
    FIT: tl.constexpr = 23 // BITS
    DOWN: tl.constexpr = LANE // FIT * FIT * BITS
    PLACE: tl.constexpr = LANE * BITS - DOWN
    EXPONENT: tl.constexpr = (127 + 23 - PLACE) << 23
    HALF: tl.constexpr = 1 << (PLACE + BITS - 1)
    code = (words.to(tl.uint32, bitcast=True) >> DOWN) & (mask << PLACE).to(tl.uint32, bitcast=True)
    m = (code ^ (EXPONENT + HALF)).to(tl.float32, bitcast=True)
    return m - float((1 << (23 - PLACE)) + (1 << (BITS - 1)))
