"""Reads the head of a quantized matrix's message: scales of rows as float32, and of columns as
bfloat16, two in a word.

Every element needs both scales of each message. They are unpacked once, not for every tile. A row
that sends nothing has the scale 0; a row that is not finite has NaN. Columns that share a word are
``apart`` places apart, so that the thread that sums both loads their scales at once.

Worked example (base 832): a row's byte 196 and the column's code 12 are the scales 3 and 0.375.

A program reads the scales of some pairs of columns of one message, and some words of the rows'
scales, if there are any left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, MatrixLayout

from .jit import constant, jit, tl
from .matrix_numbers import row_scale, scale_of, upper_of
from .scratch import buffer
from .sizes import cdiv

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
_WORDS = 128
_WARPS = 4
_PLAIN = ["message", "f", "v", "R", "rows", "pairs", "message_stride", "message_next",
          "message_matrix"]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_read_scales_kernel(
    message, f, v, R, rows, pairs, apart, columns, message_stride, message_next, message_matrix,
    WORDS: tl.constexpr,
):  # fmt: skip
    k, r = tl.program_id(1).to(tl.int64) // R, tl.program_id(1).to(tl.int64) % R
    m = tl.program_id(2).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += k * message_stride + r * message_next + m * message_matrix
    f += ((k * tl.num_programs(2) + m) * R + r) * rows
    v += ((k * tl.num_programs(2) + m) * R + r) * pairs
    column_words = (columns + 7) // 8

    both = tl.zeros([WORDS], tl.uint32)
    for half in tl.static_range(2):
        j = word + (word // apart + half) * apart
        codes = tl.load(message + 1 + j // 8, mask=j < columns, other=0)
        scale = scale_of(upper_of((codes >> (4 * (j % 8)).to(tl.int32)) & 15))
        # The scale is a bfloat16.
        both |= scale.to(tl.uint32, bitcast=True) >> (16 - 16 * half)
    tl.store(v + word, both.to(tl.int32, bitcast=True), mask=word < pairs)

    words = tl.load(message + 1 + column_words + word, mask=word < (rows + 3) // 4, other=0)
    lane = tl.arange(0, 4)[None, :]
    i = word[:, None] * 4 + lane
    byte = (words[:, None] >> (8 * lane)) & 255
    scale = tl.where(byte == _NOTHING, 0.0, row_scale(byte, tl.load(message)))
    scale = tl.where(byte == _NOT_FINITE, float("nan"), scale)
    tl.store(f + i, scale, mask=i < rows)


def read_scales(message: Tensor, *, layout: MatrixLayout, apart: int) -> tuple[Tensor, Tensor]:
    """Scales of messages ``[K, R, count, words]``, in buffers.

    Args:
        apart: distance of the columns in a pair.

    Returns:
        Scales of the rows ``[K, count, R, rows]`` float32; and of the columns
        ``[K, count, R, pairs]`` int32, as many as the codes of a row: entry ``p * apart + i`` has
        column ``2 * apart * p + i`` in its lower half, and the column ``apart`` after it in its
        upper half. Past the last column they are arbitrary.
    """
    K, R, count, _ = message.shape
    pairs = layout.row_words * layout.places * layout.group // 2
    f = buffer("matrix_f", (K, count, R, layout.rows), torch.float32, message.device, None)
    v = buffer("matrix_v", (K, count, R, pairs), torch.int32, message.device, None)
    programs = cdiv(max(pairs, layout.head[2]), _WORDS)
    matrix_read_scales_kernel[(programs, K * R, count)](
        message, f, v, R, layout.rows, pairs, apart, layout.columns, *message.stride()[:3],
        WORDS=_WORDS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return f, v
