"""Writes the head of a quantized matrix's message: base, scales of columns, room for rows' scales.

The base is ``8 * a - CENTRE``, where ``a`` is the biased exponent of the largest column's sum
(rounded to half octaves) minus the logarithm of the number of rows, rounded down. The base is 0 if
``a`` is below ``MIN_EXPONENT``.

Worked example: 20 rows and a largest sum of 100, which rounds to 96, of the biased exponent 133;
16 rows are 2**4, so the exponent is 129 and the base 8 * 129 - 136 = 896.

A program writes some words of the columns' scales and of the rows' scales, if there are any left.
The rows' bytes are zeros, which the rows' kernel fills in. The columns' scales are also written as
upper bits, because every element needs them. All rows divide by the same sum over columns, which
the first program computes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tagc.ops.matrix import CENTRE, MIN_EXPONENT

from .jit import constant, jit, tl
from .matrix_numbers import (
    column_code,
    largest_of,
    scale_of,
    sum_table,
    upper_of,
)
from .matrix_runs import (
    Run,
    first_column,
    first_word,
    head_words,
    programs_and_runs,
    whose_matrix,
    words_of_row,
)
from .sizes import cdiv

_CENTRE = constant(CENTRE)
_MIN_EXPONENT = constant(MIN_EXPONENT)
_WORDS = 128
# Elements per warp of the sum over columns, and the fewest warps.
_OF_WARP, _FEWEST_WARPS = 512, 4
_PLAIN = [
    "sums", "tops", "message", "uppers", "norms", "message_stride", "sums_stride", "norms_stride",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_scales_kernel(
    sums, tops, message, uppers, norms, runs, message_stride, sums_stride, norms_stride,
    FITTED: tl.constexpr, LOG_PLACES: tl.constexpr, LOG_WORDS: tl.constexpr, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    run, m, tile = whose_matrix(runs)
    rows, columns, row_words = run.rows, run.columns, words_of_row(run.columns, 1 << LOG_PLACES, 1)
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += d * message_stride + first_word(run, m, columns, row_words)
    column = first_column(run, m, columns, 1)
    sums += d * sums_stride + column
    tops += d * sums_stride + column
    uppers += d * sums_stride + column
    top = largest_of(tops, tl.cdiv(columns, COLUMNS))
    before_rows, before_codes = head_words(rows, columns)
    if tile == 0:
        # Half of a number's upper bits that are ones may go: then it is not rounded up.
        log_of_rows = ((rows & ~(rows >> 1)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.full([1], 0, tl.int32) + (top >> 1) - log_of_rows
        base = tl.where(exponent < _MIN_EXPONENT, 0, 8 * exponent - _CENTRE)
        tl.store(message + tl.arange(0, 1), base)
        place = tl.arange(0, 1 << LOG_PLACES)[None, :, None]
        w = tl.arange(0, 1 << LOG_WORDS)[None, None, :]
        terms = tl.zeros([1, 1 << LOG_PLACES, 1 << LOG_WORDS], tl.float32)
        for first in range(0, row_words, 1 << LOG_WORDS):
            j = place * row_words + first + w
            there = (w < row_words - first) & (j < columns)
            code = column_code(tl.load(sums + j, mask=there, other=0.0), top)
            v = tl.where(there, scale_of(upper_of(code)), 0.0)
            if FITTED:
                v = v * v
            terms += v
        norm = sum_table(terms, LOG_PLACES, LOG_WORDS)
        tl.store(norms + d * norms_stride + column + tl.arange(0, 1), norm)

    lane = tl.arange(0, 8)[None, :]
    j = word[:, None] * 8 + lane
    total = tl.load(sums + j, mask=j < columns, other=0.0)
    code = tl.where(j < columns, column_code(total, top), 0)
    tl.store(uppers + j, upper_of(code).to(tl.int16), mask=j < columns)
    code = code.to(tl.uint32, bitcast=True)
    words = tl.sum(code << (4 * lane).to(tl.uint32), 1).to(tl.int32, bitcast=True)
    tl.store(message + 1 + word, words, mask=word < before_rows - 1)
    nothing = tl.zeros([WORDS], tl.int32)
    tl.store(message + before_rows + word, nothing, mask=word < before_codes - before_rows)


def write_scales(
    sums: Tensor,
    tops: Tensor,
    message: Tensor,
    uppers: Tensor,
    norms: Tensor,
    *,
    runs: Sequence[Run],
    tile: int,
) -> None:
    """Write the heads of messages in ``message`` ``[D, words]`` int32, except the rows' scales.

    Args:
        sums, tops, tile: of :func:`.matrix_columns.sum_columns`.
        uppers: like ``sums``, int16, written: the upper 10 bits of the columns' scales.
        norms: like ``sums``, written: the divisor of the rows' sums, of each matrix at its first
            column.
    """
    layout = runs[0].layout
    words = max(run.layout.words_at_a_time for run in runs)
    warps = max(_FEWEST_WARPS, layout.places * words // _OF_WARP)
    programs, numbers = programs_and_runs(runs, lambda m: cdiv(max(m.head), _WORDS))
    matrix_scales_kernel[(programs, len(message))](
        sums, tops, message, uppers, norms, numbers, message.stride(0), sums.stride(0),
        norms.stride(0),
        FITTED=layout.fitted, LOG_PLACES=layout.places.bit_length() - 1,
        LOG_WORDS=words.bit_length() - 1, WORDS=_WORDS, COLUMNS=tile, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
