"""Blocks: quantize a row's blocks, and add up messages. :mod:`tagc.ops.blocks` has the format.

A block of ``x = float32(grad) + float32(residual)`` with the largest magnitude ``m`` has the scale
``s = bfloat16(m / levels)``. A code is ``q = rint(x * (1 / s))``, clipped if it can exceed
``levels``, and leaves ``x - q * s``. The reciprocal is an IEEE division (a GPU's plain ``/`` is
approximate); ``q * s`` is exact. The residual becomes what is left, or ``average * residual +
(1 - average) * left`` in three roundings. A block with a non-finite x has the scale NaN and codes
0, and leaves its residual as it was.

Worked example (bits 4, levels 7): a block with x = (28, -7, 21, 2, ...) has the scale 4 and the
codes (7, -2, 5, 0, ...) and leaves (0, 1, 1, 2, ...); with average 0.75 and the old residual (2, 2,
2, 2, ...), the residual becomes (1.5, 1.75, 1.75, 2, ...).

It is one pass. Scales are stored one by one, as int16, because a word of two scales may belong to
two programs. If the number of blocks is odd, the first block past the last one writes the padding.
Every other access is 16 bytes wide if rows are 16-byte aligned and 16 divides ``numel``.

The sum is ``out[k] = (sum over r of q * s) / divisor`` in float32, in the order of the ranks:
every addition rounds, from the first message on, and the division is IEEE. If the divisor is a
power of two, multiplying by its inverse gives the same bits. A program owns whole blocks, and reads
their codes and scales from one message after the other.

Worked example (bits 8, one element, 2 messages): codes 100 and -3 with the scales 0.5 and 2 add up
to 50 - 6 = 44; divided by 3, 14.666667.

After a row's blocks come programs for its uncompressed pieces, if there are any (see
:mod:`.dense`), and then for its fingerprint (see :mod:`.fingerprint`). In a sum, all programs
compare the stamps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout

from .dense import is_spoilt, put_or_note, sum_part
from .jit import cdiv, constant, division, jit, on_device_of, row_stride, tl
from .scalar import fmix32, magnitude, narrow_finite, widen

# Added to a float32 below 2**22, it leaves the rounded integer in the lowest bits.
_INTEGER = constant(1.5 * 2**23)
_INTEGER_BITS = constant(0x4B400000)
# Messages whose loads are in flight at the same time.
STEPS = 4
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
    m = largest.to(tl.float32, bitcast=True) * (1.0 / LEVELS)
    if dither is not None:  # rounded up, at most to the largest
        scale = tl.minimum((m.to(tl.uint32, bitcast=True) + 0xFFFD) >> 16, 0x7F7F)
    else:
        scale = narrow_finite(m, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
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


# Arguments whose alignment makes no difference.
_QUANTIZED = [
    "seeds", "blocks", "scales", "scales_stride", "stamp", "table", "pieces", "tiles", "messages",
    "puts", "words", "rest", "parts",
]  # fmt: skip


@jit(do_not_specialize=_QUANTIZED)
def quantize_kernel(
    grad, residual, scales, codes, seeds, n, blocks, kept, fresh,
    grad_stride, residual_stride, scales_stride, codes_stride,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, AVERAGE: tl.constexpr,
    rows=None, elements=None, stamps=None, stamp=None, table=None, pieces=None, tiles=None,
    messages=None, rows_stride=None, elements_stride=None, stamps_stride=None,
    puts=None, bits=None, sums=None, before=None, words=None, rest=None, parts=None,
    UNIT: tl.constexpr = 1, OF_WORDS: tl.constexpr = 1, HALF: tl.constexpr = False,
    TILE: tl.constexpr = 1, STAMPS: tl.constexpr = 1, SUMMED: tl.constexpr = 1,
    OF_WORD: tl.constexpr = 1,
):  # fmt: skip
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // LANES
    r = tl.program_id(1).to(tl.int64)
    if rows is not None:
        part = tl.program_id(0) - tl.cdiv(blocks + blocks % 2, BLOCKS)
        if part >= 0:
            put_or_note(
                part, r, rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride,
                elements_stride, stamps_stride, puts, bits, sums, before, words, rest, parts,
                UNIT, OF_WORDS, HALF, TILE, STAMPS, SUMMED, OF_WORD,
            )  # fmt: skip
            return
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    start = first * BLOCK
    b = tl.arange(0, BLOCKS)
    of_block = b[:, None, None] * BLOCK
    word = tl.arange(0, WORDS)[None, None, :]
    grad += r * grad_stride + start
    if residual is not None:
        residual += r * residual_stride + start
    salt = None
    if seeds is not None:
        salt = fmix32(tl.load(seeds + r).to(tl.uint32, bitcast=True))
    x, old, dither = (), (), ()
    for lane in tl.static_range(LANES):
        j = of_block + lane * WORDS + word
        inside = j < n - start
        some = widen(tl.load(grad + j, mask=inside, other=0.0))
        if residual is not None:
            old += (widen(tl.load(residual + j, mask=inside, other=0.0)),)
            some += old[lane]
        x += (some,)
        if seeds is not None:
            pair = (of_block + lane * WORDS) // 2 + tl.arange(0, WORDS // 2)[None, None, :]
            # The number of a pair wraps after 2**32 pairs.
            dither += (dither_of((start // 2 + pair).to(tl.uint32), salt),)
    scale, words, left, finite = quantize_tile(x, BITS, None if seeds is None else dither)
    scales += r * scales_stride
    codes += r * codes_stride
    tl.store(scales + first + b, scale, mask=b < blocks + blocks % 2 - first)
    place = codes + first * WORDS + (b[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
    tl.store(place, words, mask=b[:, None] < blocks - first)
    if residual is not None:
        for lane in tl.static_range(LANES):
            j = of_block + lane * WORDS + word
            stays = left[lane]
            if AVERAGE:
                stays = kept * old[lane] + fresh * stays
            stays = stays.to(residual.dtype.element_ty)
            tl.store(residual + j, stays, mask=(j < n - start) & finite[:, None, None])


@on_device_of("grad")
def quantize(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    dither: Tensor | None = None,
    *,
    layout: BlockLayout,
    average: float,
) -> None:
    """See :func:`tagc.ops.reference.quantize`."""
    if layout.blocks:
        quantize_blocks(grad, residual, message, dither, layout, average)


def quantize_blocks(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    dither: Tensor | None,
    layout: BlockLayout,
    average: float,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Launch blocks, and ``more`` programs for each row."""
    blocks, warps = blocks_and_warps(layout.block)
    scales, codes = message.view(torch.int16), message[:, layout.scale_words :]
    quantize_kernel[(cdiv(2 * layout.scale_words, blocks) + more, grad.shape[0])](
        grad, residual, scales, codes, dither, layout.numel, layout.blocks, average, 1 - average,
        grad.stride(0), row_stride(residual), scales.stride(0), codes.stride(0),
        BITS=layout.bits, BLOCKS=blocks, BLOCK=layout.block, AVERAGE=average != 0, **pieces,
        num_warps=warps,
    )  # fmt: skip


_SUMMED = [
    "R", "blocks", "divisor", "mask", "scales", "scales_stride", "scales_next", "stamp", "wrong",
    "table", "pieces", "tiles", "columns",
]  # fmt: skip


@jit(do_not_specialize=_SUMMED)
def dequantize_kernel(
    scales, codes, out, n, blocks, R, divisor, mask,
    scales_stride, scales_next, codes_stride, codes_next, out_stride,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
    ADD: tl.constexpr, AT_ONCE: tl.constexpr,
    rows=None, elements=None, stamps=None, stamp=None, wrong=None, table=None, pieces=None,
    tiles=None, columns=None, rows_stride=None, elements_stride=None, elements_next=None,
    stamps_next=None,
    UNIT: tl.constexpr = 1, OF_WORDS: tl.constexpr = 1, ONE: tl.constexpr = False,
    TILE: tl.constexpr = 1, STEPS: tl.constexpr = 1, STAMPS: tl.constexpr = 1,
):  # fmt: skip
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // LANES
    k = tl.program_id(1).to(tl.int64)
    spoilt = None
    if wrong is not None:
        spoilt = is_spoilt(stamps, stamp, wrong, R, stamps_next, STAMPS)
    if rows is not None:
        part = tl.program_id(0) - tl.cdiv(blocks, BLOCKS)
        if part >= 0:
            sum_part(
                part, k, spoilt, rows, elements, stamp, wrong, table, pieces, tiles, columns, R,
                divisor, rows_stride, elements_stride, elements_next, UNIT, OF_WORDS, ONE, DIVIDE,
                TILE, STEPS,
            )  # fmt: skip
            return
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    b = tl.arange(0, BLOCKS)
    word = b[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    scales += k * scales_stride + first
    codes += k * codes_stride + first * WORDS
    # From minus zero, the sum is the first product even if that is -0. A thread has all codes of
    # its words, lane by lane.
    begin = tl.full([BLOCKS, WORDS], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    if spoilt is not None:
        begin = tl.where(spoilt, float("nan"), begin)
    totals = (begin,) * LANES
    exists = b < blocks - first
    for _ in range(0, R, AT_ONCE):
        for _ in tl.static_range(AT_ONCE):
            s = tl.load(scales + b, mask=exists, other=0).to(tl.int32) << 16
            s = s.to(tl.float32, bitcast=True)
            w = tl.load(codes + word, mask=exists[:, None], other=0)
            s = tl.broadcast_to(s[:, None], w.shape)
            added = ()
            for lane in tl.static_range(LANES):
                # The product is exact, so fma rounds once, like the addition.
                added += (tl.fma(codes_at(w, mask, lane, BITS), s, totals[lane]),)
            totals = added
            scales += scales_next
            codes += codes_next
    start = first * BLOCK
    out += k * out_stride + start
    for lane in tl.static_range(LANES):
        x = totals[lane]
        x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
        j = b[:, None] * BLOCK + lane * WORDS + tl.arange(0, WORDS)[None, :]
        if ADD:
            x += widen(tl.load(out + j, mask=j < n - start))
        tl.store(out + j, x.to(out.dtype.element_ty), mask=j < n - start)


@on_device_of("out")
def dequantize(
    message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int, add: bool = False
) -> None:
    """See :func:`tagc.ops.reference.dequantize`."""
    if layout.blocks:
        sum_blocks(message, out, layout, divisor, add)


def sum_blocks(
    message: Tensor,
    out: Tensor,
    layout: BlockLayout,
    divisor: int,
    add: bool,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Launch blocks, and ``more`` programs for the pieces of each row."""
    K, R, _ = message.shape
    blocks, warps = blocks_and_warps(layout.block)
    scales, codes = message.view(torch.int16), message[..., layout.scale_words :]
    factor, divide = division(divisor)
    dequantize_kernel[(cdiv(layout.blocks, blocks) + more, K)](
        scales, codes, out, layout.numel, layout.blocks, R, factor, (1 << layout.bits) - 1,
        scales.stride(0), scales.stride(1), codes.stride(0), codes.stride(1), out.stride(0),
        BITS=layout.bits, BLOCKS=blocks, BLOCK=layout.block, DIVIDE=divide, ADD=add,
        AT_ONCE=math.gcd(R, STEPS), **pieces, num_warps=warps,
    )  # fmt: skip
