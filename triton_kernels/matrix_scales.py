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
from typing import Any

from torch import Tensor

from tagc.ops.matrix import CENTRE, MIN_EXPONENT

from .dense import put_or_note
from .jit import cdiv, constant, jit, tl
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

_CENTRE = constant(CENTRE)
_MIN_EXPONENT = constant(MIN_EXPONENT)
_WORDS = 128
# Elements per warp of the sum over columns, and the fewest warps.
_OF_WARP, _FEWEST_WARPS = 512, 4
_PLAIN = [
    "column_sums", "tops", "message", "uppers", "norms", "programs", "message_stride",
    "columns_stride", "stamp", "table", "pieces", "tiles", "messages", "puts", "words", "rest",
    "parts",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_scales_kernel(
    column_sums, tops, message, uppers, norms, runs, programs, message_stride, columns_stride,
    FITTED: tl.constexpr, LOG_PLACES: tl.constexpr, LOG_WORDS: tl.constexpr, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    rows=None, elements=None, stamps=None, stamp=None, table=None, pieces=None, tiles=None,
    messages=None, rows_stride=None, elements_stride=None, stamps_stride=None, puts=None, bits=None,
    sums=None, before=None, words=None, rest=None, parts=None,
    UNIT: tl.constexpr = 1, OF_WORDS: tl.constexpr = 1, HALF: tl.constexpr = False,
    TILE: tl.constexpr = 1, STAMPS: tl.constexpr = 1, SUMMED: tl.constexpr = 1,
    OF_WORD: tl.constexpr = 1,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    if rows is not None:
        part = tl.program_id(0) - programs
        if part >= 0:
            put_or_note(
                part, d, rows, elements, stamps, stamp, table, pieces, tiles, messages, rows_stride,
                elements_stride, stamps_stride, puts, bits, sums, before, words, rest, parts,
                UNIT, OF_WORDS, HALF, TILE, STAMPS, SUMMED, OF_WORD,
            )  # fmt: skip
            return
    run, m, tile = whose_matrix(runs)
    columns, row_words = run.columns, words_of_row(run.columns, 1 << LOG_PLACES, 1)
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += d * message_stride + first_word(run, m, columns, row_words)
    column = first_column(run, m, columns, 1)
    column_sums += d * columns_stride + column
    tops += d * columns_stride + column
    uppers += d * columns_stride + column
    top = largest_of(tops, tl.cdiv(columns, COLUMNS))
    before_rows, before_codes = head_words(run.rows, columns)
    if tile == 0:
        # Without the bits below a 1, the number is not rounded up.
        rounded = (run.rows & ~(run.rows >> 1)).to(tl.float32)
        log_of_rows = (rounded.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.full([1], 0, tl.int32) + (top >> 1) - log_of_rows
        base = tl.where(exponent < _MIN_EXPONENT, 0, 8 * exponent - _CENTRE)
        tl.store(message + tl.arange(0, 1), base)
        place = tl.arange(0, 1 << LOG_PLACES)[None, :, None]
        w = tl.arange(0, 1 << LOG_WORDS)[None, None, :]
        terms = tl.zeros([1, 1 << LOG_PLACES, 1 << LOG_WORDS], tl.float32)
        for first in range(0, row_words, 1 << LOG_WORDS):
            j = place * row_words + first + w
            there = (w < row_words - first) & (j < columns)
            code = column_code(tl.load(column_sums + j, mask=there, other=0.0), top)
            v = tl.where(there, scale_of(upper_of(code)), 0.0)
            if FITTED:
                v = v * v
            terms += v
        norm = sum_table(terms, LOG_PLACES, LOG_WORDS)
        tl.store(norms + d * columns_stride + column + tl.arange(0, 1), norm)

    lane = tl.arange(0, 8)[None, :]
    j = word[:, None] * 8 + lane
    total = tl.load(column_sums + j, mask=j < columns, other=0.0)
    code = tl.where(j < columns, column_code(total, top), 0)
    tl.store(uppers + j, upper_of(code).to(tl.int16), mask=j < columns)
    code = code.to(tl.uint32, bitcast=True)
    packed = tl.sum(code << (4 * lane).to(tl.uint32), 1).to(tl.int32, bitcast=True)
    tl.store(message + 1 + word, packed, mask=word < before_rows - 1)
    nothing = tl.zeros([WORDS], tl.int32)
    tl.store(message + before_rows + word, nothing, mask=word < before_codes - before_rows)


def warps_of(runs: Sequence[Run]) -> int:
    """Warps of a program."""
    elements = max(run.layout.places * run.layout.words_at_a_time for run in runs)
    return max(_FEWEST_WARPS, elements // _OF_WARP)


def write_scales(
    column_sums: Tensor,
    tops: Tensor,
    message: Tensor,
    uppers: Tensor,
    norms: Tensor,
    *,
    runs: Sequence[Run],
    tile: int,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Write the heads of messages in ``message`` ``[D, words]`` int32, except the rows' scales.

    Args:
        column_sums, tops, tile: of :func:`.matrix_columns.sum_columns`.
        uppers: like ``column_sums``, int16, written: the upper 10 bits of the columns' scales.
        norms: like ``column_sums``, written: the divisor of the rows' sums, of each matrix at its
            first column.
        more, pieces: programs for ``pieces`` of each message, see :mod:`.merged`.
    """
    layout = runs[0].layout
    words = max(run.layout.words_at_a_time for run in runs)
    programs, numbers = programs_and_runs(runs, lambda m: cdiv(max(m.head), _WORDS))
    matrix_scales_kernel[(programs + more, len(message))](
        column_sums, tops, message, uppers, norms, numbers, programs, message.stride(0),
        column_sums.stride(0),
        FITTED=layout.fitted, LOG_PLACES=layout.places.bit_length() - 1,
        LOG_WORDS=words.bit_length() - 1, WORDS=_WORDS, COLUMNS=tile, **pieces,
        num_warps=warps_of(runs),
    )  # fmt: skip
