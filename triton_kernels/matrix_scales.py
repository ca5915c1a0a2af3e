"""Writes the head of a quantized matrix's message: base, scales of columns, room for rows' scales.

The base is ``8 * a - CENTRE``, where ``a`` is the biased exponent of the largest column's sum
(rounded to half octaves) minus the logarithm of the number of rows, rounded down. The base is 0 if
``a`` is below ``MIN_EXPONENT``.

Worked example: 20 rows and a largest sum of 100, which rounds to 96, of the biased exponent 133;
16 rows are 2**4, so the exponent is 129 and the base 8 * 129 - 136 = 896.

A program writes some words of the columns' scales and of the rows' scales, if there are any left.
The rows' bytes are zeros, which the rows' kernel fills in. The columns' scales are also written as
upper bits, because every element needs them. If every element has a code, all rows divide by the
same sum over columns, which the first program computes.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.matrix import CENTRE, MIN_EXPONENT, MatrixLayout

from .jit import constant, jit, tl
from .matrix_numbers import (
    column_code,
    largest_of,
    scale_of,
    sum_table,
    upper_of,
    whose_matrix,
)
from .sizes import cdiv, next_power_of_2

_CENTRE = constant(CENTRE)
_MIN_EXPONENT = constant(MIN_EXPONENT)
_WORDS = 128
# Elements per warp of the sum over columns, and the fewest warps.
_OF_WARP, _FEWEST_WARPS = 512, 4
_PLAIN = [
    "sums", "tops", "message", "uppers", "norms", "columns", "column_tiles", "row_scale_words",
    "log", "row_words", "message_stride", "message_matrix",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_scales_kernel(
    sums, tops, message, uppers, norms, columns, column_tiles, row_scale_words, log, row_words,
    message_stride, message_matrix,
    FITTED: tl.constexpr, LOG_PLACES: tl.constexpr, LOG_WORDS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    d, m, matrix = whose_matrix()
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += d * message_stride + m * message_matrix
    sums += matrix * columns
    top = largest_of(tops + matrix * column_tiles, column_tiles)
    if tl.program_id(0) == 0:
        exponent = tl.full([1], 0, tl.int32) + (top >> 1) - log
        base = tl.where(exponent < _MIN_EXPONENT, 0, 8 * exponent - _CENTRE)
        tl.store(message + tl.arange(0, 1), base)
        if norms is not None:
            place = tl.arange(0, 1 << LOG_PLACES)[None, :, None]
            w = tl.arange(0, 1 << LOG_WORDS)[None, None, :]
            table = tl.zeros([1, 1 << LOG_PLACES, 1 << LOG_WORDS], tl.float32)
            for first in range(0, row_words, 1 << LOG_WORDS):
                j = place * row_words + first + w
                there = (w < row_words - first) & (j < columns)
                code = column_code(tl.load(sums + j, mask=there, other=0.0), top)
                v = tl.where(there, scale_of(upper_of(code)), 0.0)
                if FITTED:
                    v = v * v
                table += v
            norm = sum_table(table, LOG_PLACES, LOG_WORDS)
            tl.store(norms + matrix + tl.arange(0, 1), norm)

    lane = tl.arange(0, 8)[None, :]
    j = word[:, None] * 8 + lane
    total = tl.load(sums + j, mask=j < columns, other=0.0)
    code = tl.where(j < columns, column_code(total, top), 0)
    tl.store(uppers + matrix * columns + j, upper_of(code).to(tl.int16), mask=j < columns)
    code = code.to(tl.uint32, bitcast=True)
    words = tl.sum(code << (4 * lane).to(tl.uint32), 1).to(tl.int32, bitcast=True)
    column_words = (columns + 7) // 8
    tl.store(message + 1 + word, words, mask=word < column_words)
    nothing = tl.zeros([WORDS], tl.int32)
    tl.store(message + 1 + column_words + word, nothing, mask=word < row_scale_words)


def write_scales(
    sums: Tensor,
    tops: Tensor,
    message: Tensor,
    uppers: Tensor,
    norms: Tensor | None,
    *,
    layout: MatrixLayout,
) -> None:
    """Write the heads of ``message`` ``[D, count, words]`` int32, except the rows' scales.

    Args:
        sums, tops: from :func:`.matrix_columns.sum_columns`.
        uppers: ``[D, count, columns]`` int16, written: the upper 10 bits of the columns' scales.
        norms: ``[D, count]`` float32, written: divisors of the rows' sums; None with a group, where
            every row has its own.
    """
    _, _, row_scale_words = layout.head
    words = words_at_a_time(layout)
    warps = max(_FEWEST_WARPS, layout.places * words // _OF_WARP)
    matrix_scales_kernel[(cdiv(max(layout.head), _WORDS), *message.shape[:2])](
        sums, tops, message, uppers, norms, layout.columns, tops.shape[2], row_scale_words,
        layout.rows.bit_length() - 1, layout.row_words, message.stride(0), message.stride(1),
        FITTED=layout.fitted, LOG_PLACES=layout.places.bit_length() - 1,
        LOG_WORDS=words.bit_length() - 1, WORDS=_WORDS, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip


def words_at_a_time(layout: MatrixLayout) -> int:
    """Words of the table in which a row is summed; a power of two."""
    return min(layout.word_lanes, next_power_of_2(layout.row_words))
