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

import torch
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING

from .jit import constant, jit, tl
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
from .sizes import cdiv

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
_WORDS = 128
_WARPS = 4
_PLAIN = ["message", "f", "v", "R", "message_stride", "message_next", "f_stride",
          "v_stride"]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_read_scales_kernel(
    message, f, v, runs, R, message_stride, message_next, f_stride, v_stride,
    PAIRS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    k, r = tl.program_id(1).to(tl.int64) // R, tl.program_id(1).to(tl.int64) % R
    run, m, tile = whose_matrix(runs)
    rows, columns, row_words = run.rows, run.columns, words_of_row(run.columns, 2 * PAIRS, 1)
    word = tile.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += k * message_stride + r * message_next + first_word(run, m, columns, row_words)
    f += k * f_stride + first_row(run, m, r, R)
    v += (k * v_stride + first_row_word(run, m, r, R, row_words)) * PAIRS
    before_rows, before_codes = head_words(rows, columns)

    both = tl.zeros([WORDS], tl.uint32)
    for half in tl.static_range(2):
        j = word + (word // row_words + half) * row_words
        codes = tl.load(message + 1 + j // 8, mask=j < columns, other=0)
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
    tl.store(f + i, scale, mask=i < rows)


def read_scales(message: Tensor, *, runs: Sequence[Run], total: Before) -> tuple[Tensor, Tensor]:
    """Scales of messages ``[K, R, words]`` with these ``runs``, in buffers.

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
    matrix_read_scales_kernel[(programs, K * R)](
        message, f, v, numbers, R, message.stride(0), message.stride(1), R * total.rows,
        R * total.row_words,
        PAIRS=pairs, WORDS=_WORDS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return f, v
