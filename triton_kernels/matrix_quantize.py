"""Quantize a matrix: sums of columns, sums of rows, scales, then codes and what they leave.

Four kernels; gradient and residual are read three times, by columns, by rows and in tiles, as a
row's scale needs those of all columns, and every code needs the largest of all rows'. The codes'
kernel is here: of ``x = float32(grad) + float32(residual)`` in a row with the scale ``f`` and
columns with ``v``, a code is ``floor(x * (1 / f) * (1 / v) * 0.5)``, clipped, and leaves
``x - (2 q + 1) * f * v``; or it is the place of the largest ``|x * (1 / v)|`` of a group, plus the
group's size if that is negative, and leaves ``x`` there less or more by ``f * v``.

Worked example (2 bits, f = 0.5): x = (1.7, -0.4) with v = (1, 0.5) is (3.4, -1.6) in units of
f * v, so the codes are (1, -1), which say (1.5, -0.25) and leave (0.2, -0.15).

A program writes some words of the codes, of some rows. Code ``i * row_words + j`` of a row is in
word ``j``, so it has as many stretches of columns as a word has codes, and goes from one to the
next; a thread has the same words in all of them, so that it puts their codes together alone.

Products ``(2 q + 1) * f * v`` are exact, so a fused multiply-add leaves what a subtraction does.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, MatrixLayout

from .device import on_device_of
from .jit import constant, jit, tl
from .matrix_columns import column_tiles, sum_columns
from .matrix_numbers import row_scale, unit_of
from .matrix_rows import fit_rows, row_tiles
from .matrix_scales import write_scales
from .scalar import magnitude, narrow_finite, widen
from .scratch import buffer

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
# Below it, half of a float32 is below zero; it is the negative one next to zero.
_LEAST = constant(-(2.0**-149))
# Added to a small float32, its integer is in the lowest bits, in two's complement.
_INTEGER = constant(1.5 * 2**23)
# Elements of a program's step, its warps.
_ELEMENTS, _WARPS = 1024, 4
# Lanes whose loads are in flight at a time, at most.
_STEPS = 2
# Arguments whose alignment makes no difference.
_PLAIN = ["message", "scales", "codes", "rows", "units", "message_stride"]


@jit
def code_and_left(x, f, inverse_f, v, inverse_v, WIDTH: tl.constexpr):
    """Codes of ``[ROWS, COLUMNS]``, int32 of ``WIDTH`` bits, and what they leave, rounded once."""
    y = x * inverse_f[:, None] * inverse_v[None, :]
    v = tl.broadcast_to(v[None, :], x.shape)
    if WIDTH == 1:
        negative = y < _LEAST
        f = tl.where(negative, f[:, None], -f[:, None])
        return tl.where(negative, 1, 0), tl.fma(f, v, x)
    else:
        HALF: tl.constexpr = 1 << (WIDTH - 1)
        y = tl.minimum(tl.maximum(y * 0.5, -HALF), HALF - 1)
        nearest = y + _INTEGER
        nearest = tl.where(nearest - _INTEGER > y, nearest - 1.0, nearest)
        q = nearest - _INTEGER
        code = nearest.to(tl.int32, bitcast=True) & ((1 << WIDTH) - 1)
        return code, tl.fma(q + q + 1.0, -f[:, None] * v, x)


@jit
def place_and_left(x, f, sends, v, inverse_v, GROUP: tl.constexpr):
    """Codes of the groups of ``[ROWS, COLUMNS]``, int32 ``[ROWS, COLUMNS / GROUP]``, and what they
    leave, rounded once."""
    WORDS: tl.constexpr = x.shape[1] // GROUP
    place = tl.arange(0, GROUP)[None, None, :]
    b = magnitude(tl.reshape(x * inverse_v[None, :], [x.shape[0], WORDS, GROUP]))
    signs = tl.reshape(x.to(tl.uint32, bitcast=True) >> 31, [x.shape[0], WORDS, GROUP])
    is_largest = b == tl.expand_dims(tl.max(b, 2), 2)
    # The least is the first of the largest, with its sign below it.
    first = tl.min(tl.where(is_largest, place * 2 + signs.to(tl.int32), 2 * GROUP), 2)
    negative = (first & 1) != 0
    f = tl.where(negative, f[:, None], -f[:, None])
    hit = tl.where(sends[:, None], first >> 1, GROUP)[:, :, None] == place
    f = tl.reshape(tl.broadcast_to(f[:, :, None], hit.shape), x.shape)
    left = tl.fma(f, tl.broadcast_to(v[None, :], x.shape), x)
    left = tl.where(tl.reshape(hit, x.shape), left, x)
    return (first >> 1) + tl.where(negative, GROUP, 0), left


@jit(do_not_specialize=_PLAIN)
def quantize_matrix_kernel(
    grad, residual, v, inverse_v, message, scales, codes, rows, columns, units, kept, fresh,
    grad_stride, residual_stride, message_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, AVERAGE: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    row_words = units * UNIT
    d = tl.program_id(1).to(tl.int64)
    across = (row_words + WORDS - 1) // WORDS
    r = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(0) % across * WORDS
    exists = r < rows
    message += d * message_stride
    four = tl.load(scales + d * message_stride + r // 4, mask=exists, other=0)
    byte = (four >> (r % 4 * 8).to(tl.int32)) & 255
    sends = (byte != _NOTHING) & (byte != _NOT_FINITE)
    one = tl.full([ROWS], 1.0, tl.float32)
    f = row_scale(byte, tl.load(message))
    inverse_f = tl.div_rn(one, tl.where(sends, f, one))
    f = tl.where(sends, f, 0.0)  # leaves x as it is
    stored = exists & (byte != _NOT_FINITE)

    e = word * GROUP + tl.arange(0, WORDS * GROUP)
    start = r[:, None] * columns
    grad += d * grad_stride
    v += d * columns
    inverse_v += d * columns
    if residual is not None:
        residual += d * residual_stride
    words = tl.zeros([ROWS, WORDS], tl.int32)
    for begin in range(0, LANES, STEPS):
        for step in tl.static_range(STEPS):
            lane = begin + step
            j = lane * (row_words * GROUP) + e
            # In columns, not words, so that Triton sees how many neighbours are masked alike.
            within = (e < row_words * GROUP) & (j < columns)
            inside = exists[:, None] & within[None, :]
            at = start + j[None, :]
            x = widen(tl.load(grad + at, mask=inside, other=0.0))
            if residual is not None:
                old = widen(tl.load(residual + at, mask=inside, other=0.0))
                x += old
            vs = tl.load(v + j, mask=within, other=0.0)
            inverses = tl.load(inverse_v + j, mask=within, other=0.0)
            # What is past the row's end is zeros, of which all codes are 0.
            if GROUP == 1:
                code, left = code_and_left(x, f, inverse_f, vs, inverses, WIDTH)
            else:
                code, left = place_and_left(x, f, sends, vs, inverses, GROUP)
            words |= code << (lane * WIDTH)
            if residual is not None:
                if ROWS * WORDS * GROUP < THREADS:
                    # Several threads have the same element then: all read it before one writes.
                    tl.debug_barrier()
                if AVERAGE:
                    left = kept * old + fresh * left
                left = narrow_finite(left, residual.dtype.element_ty)
                tl.store(residual + at, left, mask=stored[:, None] & within[None, :])
    w = word + tl.arange(0, WORDS)
    place = codes + d * message_stride + (r[:, None] * row_words + w[None, :])
    words = tl.where(sends[:, None], words, 0)
    tl.store(place, words, mask=exists[:, None] & (w < row_words)[None, :])


@on_device_of("grad")
def quantize_matrix(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: MatrixLayout,
    average: float,
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`."""
    if not layout.rows:
        return
    D = grad.shape[0]
    shapes = {
        "sums": ((D, layout.columns), torch.float32),
        "tops": ((D, column_tiles(layout, D)), torch.int32),
        "fits": ((D, layout.rows), torch.int32),
        "largest": ((D, row_tiles(layout)), torch.int32),
        "norms": ((D,), torch.float32),
        "scales": ((D, layout.columns), torch.float32),
        "inverses": ((D, layout.columns), torch.float32),
    }
    sums, tops, fits, largest, norms, v, inverse_v = (
        buffer(f"matrix_{name}", shape, dtype, grad.device, None)
        for name, (shape, dtype) in shapes.items()
    )
    sum_columns(grad, residual, sums, tops, layout=layout)
    fit_rows(grad, residual, sums, tops, fits, largest, norms, layout=layout)
    write_scales(sums, tops, fits, largest, norms, message, v, inverse_v, layout=layout)
    words, rows = _tile(layout)
    lanes, unit = 32 // layout.width, unit_of(layout.row_words)
    tiles = triton.cdiv(layout.rows, rows) * triton.cdiv(layout.row_words, words)
    quantize_matrix_kernel[(tiles, D)](
        grad, residual, v, inverse_v, message, message[:, sum(layout.head[:2]) :],
        message[:, sum(layout.head) :], layout.rows, layout.columns, layout.row_words // unit,
        average, 1 - average, grad.stride(0),
        0 if residual is None else residual.stride(0), message.stride(0),
        WIDTH=layout.width, GROUP=layout.group, LANES=lanes, UNIT=unit, WORDS=words, ROWS=rows,
        STEPS=math.gcd(lanes, _STEPS), AVERAGE=average != 0, THREADS=32 * _WARPS,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _tile(layout: MatrixLayout) -> tuple[int, int]:
    """Words of a row, and rows, of a program."""
    words = min(_ELEMENTS // layout.group // 2, triton.next_power_of_2(layout.row_words))
    rows = min(_ELEMENTS // (words * layout.group), triton.next_power_of_2(layout.rows))
    return words, rows
