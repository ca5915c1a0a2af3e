"""Second pass of a quantized matrix: sum and scale of every row, once the columns' are known.

A program walks along some rows, 32 columns at a time, which is an element for each of
``ROW_LANES`` lanes; a row's own sums and those of the columns' scales grow side by side. Where
neighbours share a code, 32 columns are ``32 / group`` codes; their lanes are one ``group``-th of
all, and the next 32 columns' are the next ones.

Worked example (all elements, 1 bit, distance 1): the row (3, -1, 4) with v = (1, 0.5, 1) has the
sum 8 and the fit (3 + 0.5 + 4) / (1 + 0.25 + 1) = 3.3333333, of which the upper 12 bits, rounded,
are kept: those of 3.25.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.matrix import ROW_LANES, MatrixLayout

from .jit import jit, tl
from .matrix_numbers import (
    bounded,
    column_code,
    column_inverse,
    column_scale,
    first_largest,
    largest_of,
    load_x,
    pairs,
)
from .scalar import magnitude

# Rows of a program.
ROWS = 8
_WARPS = 1
_LOG = ROW_LANES.bit_length() - 1
# What a row that is not finite has instead of the upper bits of its scale.
NO_FIT = -1
# Arguments whose alignment makes no difference.
_PLAIN = ["rows", "tiles", "tops", "fits", "largest", "norms"]


@jit(do_not_specialize=_PLAIN)
def matrix_rows_kernel(
    grad, residual, sums, tops, fits, largest, norms, rows, columns, tiles, distance,
    grad_stride, residual_stride,
    LOG: tl.constexpr, GROUP: tl.constexpr, FITTED: tl.constexpr, NO_FIT: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << LOG
    CODES: tl.constexpr = LANES // GROUP
    # From the end: what the columns' kernel read last may be in the cache still. The codes' kernel
    # begins where this one ends.
    d = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first = tile.to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    turn = tl.arange(0, GROUP)[None, :, None]
    exists = r < rows - first
    top = largest_of(tops + d * tiles, tiles)
    start = (first + r)[:, None] * columns
    grad += d * grad_stride
    sums += d * columns
    if residual is not None:
        residual += d * residual_stride
    worst = tl.zeros([ROWS, LANES], tl.int32)
    total = tl.zeros([ROWS, LANES], tl.float32)
    scales = tl.zeros([1, LANES], tl.float32)
    # Of what codes stand for: u * v and v * v.
    product = tl.zeros([ROWS, GROUP, CODES], tl.float32)
    square = tl.zeros([1 if GROUP == 1 else ROWS, GROUP, CODES], tl.float32)
    for k in range(0, columns, LANES * STEPS):
        for step in tl.static_range(STEPS):
            j = k + step * LANES + lane
            within = j < columns
            x = load_x(grad, residual, start + j[None, :], exists[:, None] & within[None, :])
            code = column_code(tl.load(sums + j, mask=within, other=0.0), top)
            v = tl.where(within, column_scale(code), 0.0)[None, :]
            worst = tl.maximum(worst, magnitude(x))
            u = bounded(x)
            total += u
            scales += v
            if FITTED:
                uv = u * v
                vv = v * v
                if GROUP == 1:
                    product += tl.reshape(uv, [ROWS, 1, LANES])
                    square += tl.reshape(vv, [1, 1, LANES])
                else:
                    y = tl.reshape(x * column_inverse(code)[None, :], [ROWS, CODES, GROUP])
                    place = first_largest(y, GROUP)
                    hit = place[:, :, None] == tl.arange(0, GROUP)[None, None, :]
                    uv = tl.sum(tl.where(hit, tl.reshape(uv, [ROWS, CODES, GROUP]), 0.0), 2)
                    vv = tl.sum(tl.where(hit, tl.reshape(vv, [1, CODES, GROUP]), 0.0), 2)
                    mine = turn == (k // LANES + step) % GROUP
                    product += tl.where(mine, uv[:, None, :], 0.0)
                    square += tl.where(mine, vv[:, None, :], 0.0)
    finite = tl.max(worst, 1) < 0x7F800000
    row_sum = pairs(total, LOG)
    norm = pairs(scales, LOG)
    if FITTED:
        fit = pairs(tl.reshape(product, [ROWS, LANES]), LOG)
        squares = pairs(tl.reshape(square, [square.shape[0], LANES]), LOG)
        fit = tl.div_rn(fit, tl.broadcast_to(squares, [ROWS]))
    else:
        fit = tl.div_rn(row_sum, tl.broadcast_to(norm, [ROWS]))
    fit = ((fit * distance).to(tl.int32, bitcast=True) + (1 << 19)) >> 20
    tl.store(fits + d * rows + first + r, tl.where(finite, fit, NO_FIT), mask=exists)
    row_sum = tl.where(finite, row_sum, 0.0).to(tl.int32, bitcast=True)
    tl.store(largest + d * tl.num_programs(0) + tile, tl.max(row_sum, 0))
    if tile == 0:
        tl.store(norms + d + tl.arange(0, 1), norm)


def fit_rows(
    grad: Tensor,
    residual: Tensor | None,
    sums: Tensor,
    tops: Tensor,
    fits: Tensor,
    largest: Tensor,
    norms: Tensor,
    *,
    layout: MatrixLayout,
) -> None:
    """Write what the rows' scales follow from.

    Args:
        grad, residual: as :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`.
        sums, tops: from :func:`.matrix_columns.sum_columns`.
        fits: ``[D, rows]`` int32, the upper 12 bits of the row's scale; ``NO_FIT`` where the row is
            not finite.
        largest: ``[D, ceil(rows / ROWS)]`` int32, the bits of the largest sum of each program's
            finite rows.
        norms: ``[D]`` float32, the sum of the columns' scales.
    """
    matrix_rows_kernel[(largest.shape[1], grad.shape[0])](
        grad, residual, sums, tops, fits, largest, norms, layout.rows, layout.columns,
        tops.shape[1], layout.distance, grad.stride(0),
        0 if residual is None else residual.stride(0),
        LOG=_LOG, GROUP=layout.group, FITTED=layout.fitted, NO_FIT=NO_FIT, ROWS=ROWS,
        STEPS=_steps(layout), num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _steps(layout: MatrixLayout) -> int:
    """Steps at a time: their loads come before the first addition, which hides latency."""
    return 4 if layout.group == 1 else 2


def row_tiles(layout: MatrixLayout) -> int:
    """Programs of :func:`fit_rows` per destination."""
    return triton.cdiv(layout.rows, ROWS)
