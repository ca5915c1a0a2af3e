"""First pass of a quantized matrix: the sum of magnitudes of every column.

``sums[j] = sum over i of u[i, j]`` in ``COLUMN_LANES`` lanes; lane ``l`` adds up the rows ``l``,
``l + COLUMN_LANES``, and so on. A program owns some columns and walks down all rows, one row per
lane at a time.

Worked example (2 lanes): a column with the magnitudes 1, 2, 3, 4, 5 has the lanes 1 + 3 + 5 and
2 + 4, and the sum 9 + 6.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tagc.ops.matrix import COLUMN_LANES

from .jit import cdiv, jit, row_stride, tl
from .matrix_numbers import bounded, column_upper, load_x, pairs
from .matrix_runs import (
    Run,
    first_column,
    first_element,
    programs_and_runs,
    whose_matrix,
)

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


@jit(do_not_specialize=["tops"])
def matrix_columns_kernel(
    grad, residual, sums, tops, runs, grad_stride, residual_stride, columns_stride,
    LOG: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << LOG
    d = tl.program_id(1).to(tl.int64)
    run, m, tile = whose_matrix(runs)
    rows, columns = run.rows, run.columns * UNIT
    j = tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, LANES)
    first = first_element(run, m, columns, UNIT)
    grad += d * grad_stride + first
    if residual is not None:
        residual += d * residual_stride + first
    total = tl.zeros([LANES, COLUMNS], tl.float32)
    for begin in range(0, rows, LANES * STEPS):
        for step in tl.static_range(STEPS):
            i = begin + step * LANES + lane
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            at = i.to(tl.int64)[:, None] * columns + j[None, :]
            total += bounded(load_x(grad, residual, at, inside))
    found = pairs(tl.trans(total), LOG)
    column = first_column(run, m, columns, UNIT)
    tl.store(sums + d * columns_stride + column + j, found, mask=j < columns)
    tl.store(tops + d * columns_stride + column + tile, tl.max(column_upper(found), 0))


def sum_columns(
    grad: Tensor,
    residual: Tensor | None,
    sums: Tensor,
    tops: Tensor,
    *,
    runs: Sequence[Run],
    tile: int,
) -> None:
    """Write the columns' sums, and the largest upper bits of each program's sums.

    Args:
        grad, residual: as in :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`.
        sums: ``[D, columns of all matrices]`` float32.
        tops: as ``sums``, int32, written: of each matrix the first ones.
        tile: columns of a program, see :func:`columns_at_a_time`.
    """
    # Matrices with other units are another launch, so that all of one are as aligned as can be.
    for unit in {run.unit: None for run in runs}:
        some = [run for run in runs if run.unit == unit]
        programs, numbers = programs_and_runs(some, lambda m: cdiv(m.columns, tile), unit)
        matrix_columns_kernel[(programs, grad.shape[0])](
            grad, residual, sums, tops, numbers, grad.stride(0),
            row_stride(residual), sums.stride(0),
            LOG=_LOG, COLUMNS=tile, STEPS=32 * _WARPS * _IN_FLIGHT // (tile * COLUMN_LANES),
            UNIT=unit, num_warps=_WARPS,
        )  # fmt: skip


def columns_at_a_time(columns: int, D: int) -> int:
    """Columns of a program, if all matrices have so many, for each of ``D`` destinations."""
    few, many = _COLUMNS
    return many if min(D, _MOST_DESTINATIONS) * columns >= _PROGRAMS * many else few
