"""First pass of a quantized matrix: the sum of magnitudes of every column.

``sums[j] = sum over i of u[i, j]`` in ``COLUMN_LANES`` lanes; lane ``l`` adds up the rows ``l``,
``l + COLUMN_LANES``, and so on. A program owns some columns and walks down all rows, one row per
lane at a time.

Worked example (2 lanes): a column with the magnitudes 1, 2, 3, 4, 5 has the lanes 1 + 3 + 5 and
2 + 4, and the sum 9 + 6.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.matrix import COLUMN_LANES, MatrixLayout

from .jit import jit, tl
from .matrix_numbers import bounded, column_upper, load_x, pairs, whose_matrix
from .sizes import cdiv

# Columns of a program, 64 or 128 bytes of bfloat16; fewer columns give more programs. Lanes are
# chains of additions, so only columns and lanes can be divided among threads.
_COLUMNS = 32, 64
# Enough programs for an H100's 132 processors, 2 each.
_PROGRAMS = 264
# Further destinations do not count, because the check before training uses no more.
_MOST_DESTINATIONS = 8
# Elements of a thread that are loaded before the first addition; loads in flight hide latency.
_IN_FLIGHT = 32
_WARPS = 4
_LOG = COLUMN_LANES.bit_length() - 1


@jit
def matrix_columns_kernel(
    grad, residual, sums, tops, rows, columns, grad_stride, residual_stride,
    LOG: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << LOG
    d, m, matrix = whose_matrix()
    j = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, LANES)
    grad += d * grad_stride + m * rows * columns
    if residual is not None:
        residual += d * residual_stride + m * rows * columns
    total = tl.zeros([LANES, COLUMNS], tl.float32)
    for first in range(0, rows, LANES * STEPS):
        for step in tl.static_range(STEPS):
            i = first + step * LANES + lane
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            at = i.to(tl.int64)[:, None] * columns + j[None, :]
            total += bounded(load_x(grad, residual, at, inside))
    found = pairs(tl.trans(total), LOG)
    tl.store(sums + matrix * columns + j, found, mask=j < columns)
    top = tl.max(column_upper(found), 0)
    tl.store(tops + matrix * tl.num_programs(0) + tl.program_id(0), top)


def sum_columns(
    grad: Tensor, residual: Tensor | None, sums: Tensor, tops: Tensor, *, layout: MatrixLayout
) -> None:
    """Write the columns' sums, and the largest upper bits of each program's sums.

    Args:
        grad, residual: as in :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`.
        sums: ``[D, count, columns]`` float32.
        tops: ``[D, count, column_tiles(layout, D)]`` int32.
    """
    columns = _columns(layout, grad.shape[0])
    matrix_columns_kernel[(tops.shape[2], grad.shape[0], layout.count)](
        grad, residual, sums, tops, layout.rows, layout.columns, grad.stride(0),
        0 if residual is None else residual.stride(0),
        LOG=_LOG, COLUMNS=columns, STEPS=32 * _WARPS * _IN_FLIGHT // (columns * COLUMN_LANES),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def column_tiles(layout: MatrixLayout, D: int) -> int:
    """Number of programs of :func:`sum_columns` per destination and matrix."""
    return cdiv(layout.columns, _columns(layout, D))


def _columns(layout: MatrixLayout, D: int) -> int:
    few, many = _COLUMNS
    columns = min(D, _MOST_DESTINATIONS) * layout.count * layout.columns
    return many if columns >= _PROGRAMS * many else few
