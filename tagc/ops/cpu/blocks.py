"""The operators of block quantization. Elements are in a scratch array that stays in the L1
cache."""

from __future__ import annotations

import numpy as np
import torch
from numba import types
from numba.extending import overload, register_jitable
from torch import Tensor

from tagc.ops.blocks import BlockLayout
from tagc.ops.cpu.arrays import (
    ABS,
    INF,
    F,
    N,
    U,
    bits_of,
    compiled,
    float_of,
    fmix32,
    group_of,
    load,
    numpy_of,
    rows_of,
    shift_left,
    shift_right,
    signed_code,
    store_finite,
    widened,
    words_of,
    write_average,
)

_LARGEST_SCALE, _MIN_SCALE, _NAN = U(0x7F7F0000), U(0x00800000), U(0x7FC00000)


def quantize(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    dither: Tensor | None = None,
    *,
    layout: BlockLayout,
    average: float,
) -> None:
    g, e = numpy_of(widened(grad)), numpy_of(residual)
    scales = message[:, : layout.scale_words].view(torch.uint16).numpy()  # low halves first
    codes = words_of(message[:, layout.scale_words :])
    seeds = None if dither is None else words_of(dither)
    for r in range(grad.shape[0]):
        _quantize_row(
            g[r], None if e is None else e[r], layout.numel, layout.block,
            group_of(32 // layout.bits), F(layout.levels), F(1 / layout.levels), F(average),
            F(1 - average), None if seeds is None else seeds[r], scales[r], codes[r],
        )  # fmt: skip


def dequantize(
    message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int, add: bool = False
) -> None:
    wide = widened(out)
    rows = numpy_of(wide)
    for k in range(message.shape[0]):
        words, stride = rows_of(message[k])
        _dequantize_row(
            words, stride, message.shape[1], layout.numel, layout.block,
            group_of(32 // layout.bits), F(divisor), add, rows[k],
        )  # fmt: skip
    if wide is not out:
        out.copy_(wide)


@register_jitable
def _scale_of(largest, unit, salt):
    """Scale of a block, a bfloat16 as the bits of a float32; rounded up if there is a salt.

    Args:
        largest: uint32, bits of the block's largest magnitude.
        unit: float32, one over the largest code.
    """
    if largest >= INF:
        return _NAN
    b = min(bits_of(float_of(largest) * unit), _LARGEST_SCALE)
    up = U(0x7FFF) + ((b >> U(16)) & U(1)) if salt is None else U(0xFFFD)
    scale = U(U(b + up) & U(0xFFFF0000))
    return scale if scale >= _MIN_SCALE else U(0)


@register_jitable
def _salt_of(seed):
    """Hash of the seed of a row's dither, uint32; None if the seed is None."""
    return None if seed is None else fmix32(U(seed))


def _dither_at(salt, place):
    """The float32 to add to the code at ``place`` of a row before it is rounded. Without a salt
    (None) it is minus zero, which changes nothing."""
    raise NotImplementedError


@overload(_dither_at, inline="always")
def _(salt, place):
    if isinstance(salt, types.NoneType):
        return lambda salt, place: F(-0.0)

    def dithered(salt, place):
        # Even places get the lower half.
        h = shift_right(fmix32(U(U(N(place) >> N(1)) ^ salt)), U((U(place) & U(1)) << U(4)))
        h = U(h & U(0xFFFF))
        return F(np.int32(h + h) - np.int32(65535)) * F(2.0**-17)

    return dithered


@compiled
def _quantize_row(g, e, n, block, group, limit, unit, kept, fresh, seed, scales, codes):
    """Quantize one row.

    Args:
        g, e: ``[n]``, gradient and residual, as :func:`load` takes them; ``e`` is updated.
        limit, unit: float32, the largest code and one over it.
        kept, fresh: float32, shares of the old and of the new residual.
        seed: uint32, seed of the dither; None to round to nearest.
        scales: ``[2 * scale_words]`` uint16, written.
        codes: ``[blocks * block_words]`` uint32, written.
    """
    size, lanes, width = N(block), N(len(group)), U(32 // len(group))
    words = size // lanes
    mask = U(U(0xFFFFFFFF) >> U(32 - width))
    x, c = np.empty(block, np.float32), np.empty(block, np.uint32)
    blocks = (N(n) + size - N(1)) // size
    salt = _salt_of(seed)
    for b in range(blocks):
        base = b * size
        fill = min(size, N(n) - base)
        for j in range(fill):
            x[j] = load(g, base + j) + load(e, base + j)
        for j in range(fill, size):
            x[j] = F(0.0)
        largest = U(0)
        # Builtin min and max can prevent vectorization of this loop.
        for j in range(size):
            m = U(bits_of(x[j]) & ABS)
            largest = m if m > largest else largest
        scale = _scale_of(largest, unit, salt)
        scales[b] = np.uint16(scale >> U(16))
        at = b * words
        if scale == U(0) or scale == _NAN:
            for j in range(words):
                codes[at + j] = U(0)
        else:
            s = float_of(scale)
            inverse = F(1.0) / s
            for j in range(size):
                scaled = x[j] * inverse
                scaled = limit if scaled > limit else scaled
                scaled = -limit if scaled < -limit else scaled
                q = np.rint(scaled + _dither_at(salt, base + j))
                x[j] = x[j] - q * s
                c[j] = U(np.int32(q))
            for j in range(words):
                word = U(c[j] & mask)
                for i in range(N(1), lanes):
                    word |= shift_left(U(c[i * words + j] & mask), U(i) * width)
                codes[at + j] = word
        if e is None or scale == _NAN:
            continue
        if kept == F(0.0):
            for j in range(fill):
                store_finite(e, base + j, x[j])
        else:
            for j in range(fill):
                store_finite(e, base + j, kept * load(e, base + j) + fresh * x[j])
    for b in range(blocks, N(scales.size)):
        scales[b] = np.uint16(0)


@compiled
def _dequantize_row(messages, stride, ranks, n, block, group, divisor, add, out):
    """Add up messages.

    Args:
        messages: ``[...]`` uint32, in which the messages begin ``stride`` words apart.
        out: ``[n]``, as :func:`store` takes it.
    """
    size, lanes, width = N(block), N(len(group)), U(32 // len(group))
    words, above = size // lanes, U(32) - width
    blocks = (N(n) + size - N(1)) // size
    codes = (blocks + N(1)) >> N(1)
    sums = np.empty(block, np.float32)
    for b in range(blocks):
        for j in range(size):
            sums[j] = F(-0.0)  # changes no sum
        for r in range(N(ranks)):
            first = r * N(stride)
            word = messages[first + (b >> N(1))]
            s = float_of(word & U(0xFFFF0000) if b & N(1) else word << U(16))
            at = first + codes + b * words
            for i in range(lanes):
                to, up = i * words, above - width * U(i)
                for j in range(words):
                    sums[to + j] += s * signed_code(shift_left(messages[at + j], up), above)
        base = b * size
        write_average(sums, min(size, N(n) - base), divisor, add, out, base)
