"""Quantize a matrix: sums of columns, sums of rows, scales, then codes and what they leave.

Four kernels; gradient and residual are read three times, by columns, by rows and in tiles, as a
row's scale needs those of all columns, and every code needs the largest of all rows'. The codes'
kernel is here: of ``x = float32(grad) + float32(residual)`` in a row with the scale ``f`` and
columns with ``v``, a code is ``floor(x * (1 / f) * (1 / v) * 0.5)``, clipped, and leaves
``x - (2 q + 1) * f * v``; or it is the place of the largest ``|x * (1 / v)|`` of a group, plus the
group's size if that is negative, and leaves ``x`` there less or more by ``f * v``.

Worked example (2 bits, f = 0.5): x = (1.7, -0.4) with v = (1, 0.5) is (3.4, -1.6) in units of
f * v, so the codes are (1, -1), which say (1.5, -0.25) and leave (0.2, -0.15).

A program's tile is some words of the codes, of some rows. Code ``i * row_words + j`` of a row is in
word ``j``, so a tile has as many stretches of columns as a word has codes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, MatrixLayout

from .device import on_device_of
from .jit import constant, jit, tl
from .matrix_columns import COLUMNS, sum_columns
from .matrix_numbers import (
    column_code,
    column_inverse,
    column_scale,
    first_largest,
    row_scale,
    tile_of,
    unit_of,
)
from .matrix_rows import fit_rows, row_tiles
from .matrix_scales import write_scales
from .scalar import narrow_finite, widen
from .scratch import buffer

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
# Elements of a program's tile, and of a thread of it.
_ELEMENTS, _EACH = 2048, 16
# Arguments whose alignment makes no difference.
_PLAIN = ["tallest", "message", "scales", "codes", "rows", "units", "message_stride"]


@jit(do_not_specialize=_PLAIN)
def quantize_matrix_kernel(
    grad, residual, sums, tallest, message, scales, codes, rows, columns, units, kept, fresh,
    grad_stride, residual_stride, message_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, AVERAGE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    PADDED: tl.constexpr = 8 if LANES < 8 else LANES
    STRETCH: tl.constexpr = WORDS * GROUP
    SIZE: tl.constexpr = PADDED * STRETCH
    row_words = units * UNIT
    d = tl.program_id(1).to(tl.int64)
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
    inside = exists[:, None] & within[None, :]
    at = (first + r)[:, None] * columns + j[None, :]
    x = widen(tl.load(grad + d * grad_stride + at, mask=inside, other=0.0))
    if residual is not None:
        residual += d * residual_stride
        old = widen(tl.load(residual + at, mask=inside, other=0.0))
        x += old
    total = tl.load(sums + d * columns + j, mask=within, other=0.0)
    code = column_code(total, tl.load(tallest + d))
    v = column_scale(code)[None, :]
    inverse = column_inverse(code)[None, :]
    four = tl.load(scales + d * message_stride + (first + r) // 4, mask=exists, other=0)
    byte = (four >> ((first + r) % 4 * 8).to(tl.int32)) & 255
    sends = (byte != _NOTHING) & (byte != _NOT_FINITE)
    one = tl.full([ROWS], 1.0, tl.float32)
    f = tl.where(sends, row_scale(byte, tl.load(message + d * message_stride)), one)
    # What is past the row's end is zeros, of which all codes are 0.
    if GROUP == 1:
        HALF: tl.constexpr = 1 << (WIDTH - 1)
        y = x * tl.div_rn(one, f)[:, None] * inverse * 0.5
        # Clipped first, to integers: the floor is the same, and PTX's own flushes subnormals.
        y = tl.where(sends[:, None], tl.minimum(tl.maximum(y, -HALF), HALF - 1), 0.0)
        q = y.to(tl.int32)
        q = tl.where(q.to(tl.float32) > y, q - 1, q)
        left = x - (2 * q + 1).to(tl.float32) * (f[:, None] * v)
        q = q & ((1 << WIDTH) - 1)
    else:
        negative = tl.reshape(x.to(tl.int32, bitcast=True) < 0, [ROWS, PADDED * WORDS, GROUP])
        place = first_largest(tl.reshape(x * inverse, [ROWS, PADDED * WORDS, GROUP]), GROUP)
        hit = place[:, :, None] == tl.arange(0, GROUP)[None, None, :]
        q = place + tl.sum(tl.where(hit & negative, GROUP, 0), 2)
        q = tl.where(sends[:, None], q, 0)
        said = tl.where(negative, -1.0, 1.0)
        said = tl.reshape(tl.where(hit, said, 0.0), [ROWS, SIZE])
        left = x - said * (f[:, None] * v)
    # Lanes past a word's last are zeros, but a shift by 32 or more is undefined, and what LLVM
    # makes of it is not a zero: all codes were garbage.
    shift = tl.minimum(tl.arange(0, PADDED) * WIDTH, 31).to(tl.uint32)
    lanes = tl.reshape(q.to(tl.uint32, bitcast=True), [ROWS, PADDED, WORDS])
    words = tl.sum(lanes << shift[None, :, None], 1).to(tl.int32, bitcast=True)
    w = word + tl.arange(0, WORDS)
    codes += d * message_stride
    tl.store(
        codes + (first + r)[:, None] * row_words + w[None, :],
        words,
        mask=exists[:, None] & (w < row_words)[None, :],
    )
    if residual is not None:
        if ROWS * SIZE < THREADS:
            # Several threads have the same element then: all of them read it before one writes.
            tl.debug_barrier()
        left = tl.where(sends[:, None], left, x)
        if AVERAGE:
            left = kept * old + fresh * left
        left = narrow_finite(left, residual.dtype.element_ty)
        tl.store(residual + at, left, mask=inside & (byte != _NOT_FINITE)[:, None])


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
        "tops": ((D, triton.cdiv(layout.columns, COLUMNS)), torch.int32),
        "fits": ((D, layout.rows), torch.int32),
        "largest": ((D, row_tiles(layout)), torch.int32),
        "norms": ((D,), torch.float32),
        "tallest": ((D,), torch.int32),
    }
    sums, tops, fits, largest, norms, tallest = (
        buffer(f"matrix_{name}", shape, dtype, grad.device, None)
        for name, (shape, dtype) in shapes.items()
    )
    sum_columns(grad, residual, sums, tops, layout=layout)
    fit_rows(grad, residual, sums, tops, fits, largest, norms, layout=layout)
    write_scales(sums, tops, fits, largest, norms, message, tallest, layout=layout)
    words, rows = tile_of(layout, _ELEMENTS)
    unit = unit_of(layout.row_words)
    tiles = triton.cdiv(layout.rows, rows) * triton.cdiv(layout.row_words, words)
    quantize_matrix_kernel[(tiles, D)](
        grad, residual, sums, tallest, message, message[:, sum(layout.head[:2]) :],
        message[:, sum(layout.head) :], layout.rows, layout.columns, layout.row_words // unit,
        average, 1 - average, grad.stride(0),
        0 if residual is None else residual.stride(0), message.stride(0),
        WIDTH=layout.width, GROUP=layout.group, LANES=32 // layout.width, UNIT=unit,
        WORDS=words, ROWS=rows, AVERAGE=average != 0, THREADS=_ELEMENTS // _EACH,
        num_warps=_ELEMENTS // _EACH // 32, enable_fp_fusion=False,
    )  # fmt: skip
