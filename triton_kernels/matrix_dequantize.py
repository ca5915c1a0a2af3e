"""Dequantize a matrix: add up messages in the order of the ranks, divide, tile by tile.

``out[i, j] = (sum over r of value * (f_r[i] * v_r[j])) / divisor`` in float32, where a value is
``2 q + 1``, or of a group 1 or -1 where its code points and else 0. Products are exact, every
addition rounds, from the first message on, and the division is IEEE; where the divisor is a power
of two, multiplying by its inverse gives the same bits.

Worked example (2 bits, one element, 2 messages): codes 1 and -2 with f * v = 0.5 and 0.25 add up to
1.5 - 0.75; divided by 3, 0.25.

A program's tile is that of :mod:`.matrix_quantize`, with more rows: they share the columns' scales,
which are unpacked anew for each tile.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, MatrixLayout

from .device import on_device_of
from .jit import constant, jit, tl
from .matrix_numbers import column_scale, row_scale, tile_of, unit_of
from .scalar import narrow

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
# Elements of a program's tile, and of a thread of it.
_ELEMENTS, _EACH = 4096, 16
# Arguments whose alignment makes no difference.
_PLAIN = ["message", "scales", "codes", "rows", "units", "R", "divisor", "message_stride"]


@jit(do_not_specialize=_PLAIN)
def dequantize_matrix_kernel(
    message, scales, codes, out, rows, columns, units, R, divisor, message_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = 8 if LANES < 8 else LANES
    STRETCH: tl.constexpr = WORDS * GROUP
    SIZE: tl.constexpr = PADDED * STRETCH
    row_words = units * UNIT
    across = (row_words + WORDS - 1) // WORDS
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    word = tl.program_id(0) % across * WORDS
    r = tl.arange(0, ROWS)
    e = tl.arange(0, SIZE)
    lane = e // STRETCH
    j = (lane * row_words + word) * GROUP + e % STRETCH
    # In columns, not words, so that Triton sees how many neighbours are masked alike. Lanes past
    # the last begin past the last column.
    within = (word * GROUP + e % STRETCH < row_words * GROUP) & (j < columns)
    exists = r < rows - first
    w = word + tl.arange(0, WORDS)
    # Lanes past a word's last have no columns, but a shift by less than 0 is undefined.
    shift = tl.maximum(32 - WIDTH - (tl.arange(0, PADDED) * WIDTH)[None, :, None], 0)
    codes += (first + r)[:, None] * row_words + w[None, :]
    scales += (first + r) // 4
    # No term is minus zero, so the sum may as well start from zero.
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for _ in range(R):
        four = tl.load(message + 1 + j // 8, mask=within, other=0)
        v = column_scale((four >> (j % 8 * 4)) & 15)[None, :]
        four = tl.load(scales, mask=exists, other=0)
        byte = (four >> ((first + r) % 4 * 8).to(tl.int32)) & 255
        f = row_scale(byte, tl.load(message))
        f = tl.where(byte == _NOT_FINITE, float("nan"), f)[:, None]
        words = tl.load(codes, mask=exists[:, None] & (w < row_words)[None, :], other=0)
        if GROUP == 1:
            q = (words[:, None, :] << shift) >> (32 - WIDTH)
            value = tl.reshape((2 * q + 1).to(tl.float32), [ROWS, SIZE])
        else:
            q = (words[:, None, :] << shift).to(tl.uint32, bitcast=True)
            q = (q >> (32 - WIDTH)).to(tl.int32)
            q = tl.reshape(q, [ROWS, PADDED * WORDS, 1])
            hit = q % GROUP == tl.arange(0, GROUP)[None, None, :]
            value = tl.where(hit, tl.where(q >= GROUP, -1.0, 1.0), 0.0)
            value = tl.reshape(value, [ROWS, SIZE])
        total += tl.where((byte != _NOTHING)[:, None], value * (f * v), 0.0)
        message += message_stride
        scales += message_stride
        codes += message_stride
    total = tl.div_rn(total, tl.zeros_like(total) + divisor) if DIVIDE else total * divisor
    at = (first + r)[:, None] * columns + j[None, :]
    total = narrow(total, out.dtype.element_ty)
    tl.store(out + at, total, mask=exists[:, None] & within[None, :])


@on_device_of("out")
def dequantize_matrix(message: Tensor, out: Tensor, *, layout: MatrixLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`."""
    if not layout.rows:
        return
    words, rows = tile_of(layout, _ELEMENTS)
    unit = unit_of(layout.row_words)
    divide = divisor & (divisor - 1) != 0
    tiles = triton.cdiv(layout.rows, rows) * triton.cdiv(layout.row_words, words)
    dequantize_matrix_kernel[(tiles,)](
        message, message[:, sum(layout.head[:2]) :], message[:, sum(layout.head) :], out,
        layout.rows, layout.columns, layout.row_words // unit, message.shape[0],
        float(divisor) if divide else 1.0 / divisor, message.stride(0),
        WIDTH=layout.width, GROUP=layout.group, LANES=32 // layout.width, UNIT=unit,
        WORDS=words, ROWS=rows, DIVIDE=divide,
        num_warps=_ELEMENTS // _EACH // 32, enable_fp_fusion=False,
    )  # fmt: skip
