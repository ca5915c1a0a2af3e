"""Reads the head of a quantized matrix's message: scales of rows as float32, and of columns as
bfloat16, two in a word.

Every element needs both scales of each message. They are unpacked once, not for every tile. A row
that sends nothing has the scale 0; a row that is not finite has NaN. Columns whose codes are next
to each other in a word share a word, so that the thread that sums both loads their scales at once.

Worked example (base 832): a row's byte 196 and the column's code 12 are the scales 3 and 0.375.

A program reads the scales of some pairs of columns of one message, and some words of the rows'
scales, if there are any left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING

from .dense import is_spoilt, sum_part
from .jit import cdiv, constant, jit, tl
from .matrix_numbers import row_scale, scale_of, upper_of
from .matrix_runs import (
    Before,
    Run,
    first_row,
    first_row_word,
    first_word,
    head_words,
    programs_and_runs,
    whose_matrix,
    words_of_row,
)
from .scratch import buffer

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
_WORDS = 128
WARPS = 4
_PLAIN = [
    "message", "f", "v", "programs", "R", "message_stride", "message_next", "f_stride", "v_stride",
    "divisor", "stamp", "wrong", "table", "pieces", "tiles", "columns",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_read_scales_kernel(
    message, f, v, runs, programs, R, message_stride, message_next, f_stride, v_stride,
    PAIRS: tl.constexpr, WORDS: tl.constexpr,
    divisor=None, rows=None, elements=None, stamps=None, stamp=None, wrong=None, table=None,
    pieces=None, tiles=None, columns=None, rows_stride=None, elements_stride=None,
    elements_next=None, stamps_next=None,
    DIVIDE: tl.constexpr = False, UNIT: tl.constexpr = 1, OF_WORDS: tl.constexpr = 1,
    ONE: tl.constexpr = False, TILE: tl.constexpr = 1, STEPS: tl.constexpr = 1,
    STAMPS: tl.constexpr = 1,
):  # fmt: skip
    k, r = tl.program_id(1).to(tl.int64) // R, tl.program_id(1).to(tl.int64) % R
    spoilt = None
    if wrong is not None:
        spoilt = is_spoilt(stamps, stamp, wrong, R, stamps_next, STAMPS)
    if rows is not None:
        part = tl.program_id(0) - programs
        if part >= 0:
            if r == 0:
                sum_part(
                    part, k, spoilt, rows, elements, stamp, wrong, table, pieces, tiles, columns, R,
                    divisor, rows_stride, elements_stride, elements_next, UNIT, OF_WORDS, ONE,
                    DIVIDE, TILE, STEPS,
                )  # fmt: skip
            return
    run, m, tile = whose_matrix(runs)
    row_words = words_of_row(run.columns, 2 * PAIRS, 1)
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += k * message_stride + r * message_next + first_word(run, m, run.columns, row_words)
    f += k * f_stride + first_row(run, m, r, R)
    v += (k * v_stride + first_row_word(run, m, r, R, row_words)) * PAIRS
    before_rows, before_codes = head_words(run.rows, run.columns)

    both = tl.zeros([WORDS], tl.uint32)
    for half in tl.static_range(2):
        j = word + (word // row_words + half) * row_words
        codes = tl.load(message + 1 + j // 8, mask=j < run.columns, other=0)
        scale = scale_of(upper_of((codes >> (4 * (j % 8)).to(tl.int32)) & 15))
        # The scale is a bfloat16.
        both |= scale.to(tl.uint32, bitcast=True) >> (16 - 16 * half)
    tl.store(v + word, both.to(tl.int32, bitcast=True), mask=word < row_words * PAIRS)

    inside = word < before_codes - before_rows
    words = tl.load(message + before_rows + word, mask=inside, other=0)
    lane = tl.arange(0, 4)[None, :]
    i = word[:, None] * 4 + lane
    byte = (words[:, None] >> (8 * lane)) & 255
    scale = tl.where(byte == _NOTHING, 0.0, row_scale(byte, tl.load(message)))
    scale = tl.where(byte == _NOT_FINITE, float("nan"), scale)
    if spoilt is not None:
        scale = tl.where(spoilt, float("nan"), scale)
    tl.store(f + i, scale, mask=i < run.rows)


def read_scales(
    message: Tensor,
    *,
    runs: Sequence[Run],
    total: Before,
    divisor: float = 1.0,
    divide: bool = False,
    more: int = 0,
    **pieces: Any,
) -> tuple[Tensor, Tensor]:
    """Scales of messages ``[K, R, words]`` with these ``runs``, in buffers.

    Args:
        divisor, divide, more, pieces: programs for ``pieces`` of the messages, and how they divide.

    Returns:
        Scales of the rows, ``[K, rows of all messages]`` float32, matrix by matrix and message by
        message; and of the columns ``[K, pairs of all messages]`` int32, for each message of a
        matrix as many pairs as a row of codes has places for. With ``m`` words in a row, entry
        ``p * m + i`` has column ``2 * p * m + i`` in its lower half, and the column ``m`` after it
        in its upper half. Past the last column they are arbitrary.
    """
    K, R, _ = message.shape
    pairs = runs[0].layout.places // 2
    rows, columns = (K, R * total.rows), (K, R * total.row_words * pairs)
    f = buffer("matrix_f", rows, torch.float32, message.device, None)
    v = buffer("matrix_v", columns, torch.int32, message.device, None)
    programs, numbers = programs_and_runs(
        runs, lambda m: cdiv(max(m.row_words * pairs, m.head[2]), _WORDS)
    )
    if pieces:
        pieces |= {"divisor": divisor, "DIVIDE": divide}
    matrix_read_scales_kernel[(programs + more, K * R)](
        message, f, v, numbers, programs, R, message.stride(0), message.stride(1), R * total.rows,
        R * total.row_words,
        PAIRS=pairs, WORDS=_WORDS, **pieces, num_warps=WARPS,
    )  # fmt: skip
    return f, v
