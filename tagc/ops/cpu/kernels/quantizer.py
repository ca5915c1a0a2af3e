"""Kernels of block quantization, with elements in a scratch array that stays in the L1 cache."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from tagc.ops.cpu.kernels.llvm import (
    add_codes,
    bits_float,
    float_bits,
    put_codes,
    shift_left,
    shift_right,
    shift_right_signed,
)
from tagc.ops.cpu.kernels.output import TILE, new_tile, write_tile
from tagc.ops.cpu.kernels.scalar import N, U, compiled, fmix32, load, store_finite

_ABS, _INF = U(0x7FFFFFFF), U(0x7F800000)
_LARGEST_SCALE, _MIN_SCALE, _NAN = U(0x7F7F0000), U(0x00800000), U(0x7FC00000)


@register_jitable
def _scale_of(largest, unit, salt):
    """Scale of a block, a bfloat16 as the uint32 bits of a float32; rounded up if there is a salt.

    Args:
        largest: uint32, bits of the block's largest magnitude.
        unit: float32, one over the largest code.
        salt: as in :func:`dither_at`.
    """
    if largest >= _INF:
        return _NAN
    b = min(float_bits(bits_float(largest) * unit), _LARGEST_SCALE)
    up = U(0x7FFF) + ((b >> U(16)) & U(1)) if salt is None else U(0xFFFD)
    scale = U(U(b + up) & U(0xFFFF0000))
    return scale if scale >= _MIN_SCALE else U(0)


def dither_at(salt, place):
    """The float32 to add to the code at ``place`` of a row before it is rounded. Without a salt
    (None) it is minus zero, which changes nothing."""
    raise NotImplementedError


def salt_of(seed):
    """Hash of the seed of a row's dither, uint32; None if the seed is None."""
    raise NotImplementedError


@overload(salt_of)
def _(seed):
    if isinstance(seed, types.NoneType):
        return lambda seed: None
    return lambda seed: fmix32(U(seed))


@overload(dither_at, inline="always")
def _(salt, place):
    if isinstance(salt, types.NoneType):
        return lambda salt, place: np.float32(-0.0)

    def dithered(salt, place):
        # Even places get the lower half.
        h = shift_right(fmix32(U(U(N(place) >> N(1)) ^ salt)), U((U(place) & U(1)) << U(4)))
        h = U(h & U(0xFFFF))
        return np.float32(np.int32(h + h) - np.int32(65535)) * np.float32(2.0**-17)

    return dithered


@register_jitable
def quantize_block(x, c, group, limit, unit, salt, first, codes, at):
    """Quantize one block.

    Args:
        x: ``[block]`` float32; becomes the quantization error, or stays if it is not all finite.
        c: ``[block]`` uint32, scratch.
        group: a tuple of as many entries as a word has codes.
        limit: float32, the largest code.
        unit: float32, one over it.
        salt: uint32, the hash of the row's seed; None to round to nearest.
        first: place of the block's first element in the row.
        codes: ``[...]`` uint32, written from ``at`` on, ``block / len(group)`` words.
        at: start of the block's codes.

    Returns:
        The scale, the bits of a float32 as uint32; NaN if ``x`` is not all finite.
    """
    lanes = N(len(group))
    size = N(x.size)
    words = size // lanes
    largest = U(0)
    # Builtin min and max can prevent vectorization of this loop.
    for j in range(size):
        m = U(float_bits(x[j]) & _ABS)
        largest = m if m > largest else largest
    scale = _scale_of(largest, unit, salt)
    if scale == U(0) or scale == _NAN:
        for j in range(words):
            codes[at + j] = U(0)
        return scale
    s = bits_float(scale)
    inverse = np.float32(1.0) / s
    for j in range(size):
        scaled = x[j] * inverse
        scaled = limit if scaled > limit else scaled
        scaled = -limit if scaled < -limit else scaled
        q = np.rint(scaled + dither_at(salt, first + j))
        x[j] = x[j] - q * s
        c[j] = U(np.int32(q))
    width = U(32 // len(group))
    mask = U(U(0xFFFFFFFF) >> U(32 - width))
    for j in range(words):
        word = U(c[j] & mask)
        for i in range(N(1), lanes):
            word |= shift_left(U(c[i * words + j] & mask), U(U(i) * width))
        codes[at + j] = word
    return scale


@compiled
def quantize_row(g, e, n, block, group, limit, unit, kept, fresh, seed, scales, codes):
    """Quantize one row, see :meth:`tagc.ops.blocks.BlockOps.quantize`.

    Args:
        g: ``[n]``, the gradient, float32 or the bits of bfloat16 as uint16.
        e: ``[n]``, the residual in the same dtypes, updated; or None.
        n: elements.
        block: elements of a block.
        group: a tuple of as many entries as a word has codes.
        limit, unit: float32, the largest code and one over it.
        kept, fresh: float32, shares of the old and of the new residual.
        seed: uint32, seed of the dither; None to round to nearest.
        scales: ``[2 * scale_words]`` uint16, written.
        codes: ``[blocks * block_words]`` uint32, written.
    """
    x, c = np.empty(block, np.float32), np.empty(block, np.uint32)
    words = N(block // len(group))
    blocks = N((n + block - 1) // block)
    salt = salt_of(seed)
    for b in range(blocks):
        base = b * N(block)
        fill = min(N(block), N(n) - base)
        for j in range(fill):
            x[j] = load(g, base + j) + load(e, base + j)
        for j in range(fill, N(block)):
            x[j] = np.float32(0.0)
        scale = quantize_block(x, c, group, limit, unit, salt, base, codes, b * words)
        scales[b] = np.uint16(scale >> U(16))
        if e is None or scale == _NAN:
            continue
        if kept == np.float32(0.0):
            for j in range(fill):
                store_finite(e, base + j, x[j])
        else:
            for j in range(fill):
                store_finite(e, base + j, kept * load(e, base + j) + fresh * x[j])
    for b in range(blocks, N(scales.size)):
        scales[b] = np.uint16(0)


@register_jitable
def scale_at(words, at, b):
    """float32 scale of block ``b``; scales begin at ``words[at]``, ``[...]`` uint32."""
    word = words[at + (b >> N(1))]
    return bits_float(U(word & U(0xFFFF0000)) if b & N(1) else shift_left(word, U(16)))


@register_jitable
def dequantize_block(words, at, count, group, s, out, to):
    """Write the elements of a block.

    Args:
        words: ``[...]`` uint32, in which the block's codes begin at ``at``.
        count: uint64, words of a block.
        group: a tuple of as many entries as a word has codes.
        s: float32, the scale.
        out: ``[...]`` float32, written from ``to`` on, ``count * len(group)`` elements.
    """
    if count & N(7) == N(0):
        for j in range(N(0), count, N(8)):
            put_codes(words, at + j, group, s, out, to + j, count)
        return
    width = U(32 // len(group))
    for i in range(N(len(group))):
        up, base = U(32 - width * U(i + N(1))), to + i * count
        for j in range(count):
            out[base + j] = s * shift_right_signed(shift_left(words[at + j], up), U(U(32) - width))


@register_jitable
def add_block(words, at, count, group, s, out, to):
    """:func:`dequantize_block`, but adds to ``out``."""
    if count & N(7) == N(0):
        for j in range(N(0), count, N(8)):
            add_codes(words, at + j, group, s, out, to + j, count)
        return
    width = U(32 // len(group))
    for i in range(N(len(group))):
        up, base = U(32 - width * U(i + N(1))), to + i * count
        for j in range(count):
            out[base + j] += s * shift_right_signed(shift_left(words[at + j], up), U(U(32) - width))


@compiled
def dequantize_shard(messages, stride, ranks, n, block, group, divisor, add, out):
    """Add up messages, see :meth:`tagc.ops.blocks.BlockOps.dequantize`.

    Args:
        messages: ``[...]`` uint32, in which the messages begin ``stride`` words apart.
        stride: words from one message to the next.
        ranks: number of messages.
        n: elements.
        block: elements of a block.
        group: a tuple of as many entries as a word has codes.
        divisor: float32.
        add: whether to add what ``out`` holds.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
    """
    size, words = N(block), N(block // len(group))
    blocks = (N(n) + size - N(1)) // size
    codes = (blocks + N(1)) >> N(1)
    sums = new_tile(TILE, out)
    for base in range(N(0), N(n), N(TILE)):
        first, count = base // size, min(N(TILE), N(n) - base)
        for b in range(first, min(blocks, first + N(TILE) // size)):
            to = b * size - base
            for r in range(N(ranks)):
                at = r * N(stride)
                s = scale_at(messages, at, b)
                at += codes + b * words
                if r == N(0):
                    dequantize_block(messages, at, words, group, s, sums, to)
                else:
                    add_block(messages, at, words, group, s, sums, to)
        write_tile(sums, count, divisor, add, out, base)
