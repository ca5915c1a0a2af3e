"""The head of a quantized matrix's message, read: scales of rows and of columns as float32.

Every element needs both of each message, and so do the rows below a column and the columns beside a
row. So they are unpacked once, not for every tile. A row that says nothing has the scale 0, one
that is not finite NaN.

Worked example (base 832): a row's byte 196 and the column's code 12 are the scales 3 and 0.375.

A program reads some words of one message, of the columns' scales and of the rows', whichever there
are.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, MatrixLayout

from .jit import constant, jit, tl
from .matrix_numbers import row_scale, scale_of, upper_of
from .scratch import buffer

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
_WORDS = 128
_WARPS = 4
_PLAIN = ["message", "f", "v", "R", "rows", "columns", "message_stride", "message_next"]


@jit(do_not_specialize=_PLAIN)
def matrix_read_scales_kernel(
    message, f, v, R, rows, columns, message_stride, message_next, WORDS: tl.constexpr
):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += (r // R) * message_stride + (r % R) * message_next
    column_words = (columns + 7) // 8

    words = tl.load(message + 1 + word, mask=word < column_words, other=0)
    lane = tl.arange(0, 8)[None, :]
    j = word[:, None] * 8 + lane
    code = (words[:, None] >> (4 * lane)) & 15
    tl.store(v + r * columns + j, scale_of(upper_of(code)), mask=j < columns)

    words = tl.load(message + 1 + column_words + word, mask=word < (rows + 3) // 4, other=0)
    lane = tl.arange(0, 4)[None, :]
    i = word[:, None] * 4 + lane
    byte = (words[:, None] >> (8 * lane)) & 255
    scale = tl.where(byte == _NOTHING, 0.0, row_scale(byte, tl.load(message)))
    scale = tl.where(byte == _NOT_FINITE, float("nan"), scale)
    tl.store(f + r * rows + i, scale, mask=i < rows)


def read_scales(message: Tensor, *, layout: MatrixLayout) -> tuple[Tensor, Tensor]:
    """Scales of the rows ``[K * R, rows]`` and of the columns ``[K * R, columns]``, float32, in
    buffers, of messages ``[K, R, words]``."""
    K, R, _ = message.shape
    f = buffer("matrix_f", (K * R, layout.rows), torch.float32, message.device, None)
    v = buffer("matrix_v", (K * R, layout.columns), torch.float32, message.device, None)
    matrix_read_scales_kernel[(triton.cdiv(max(layout.head), _WORDS), K * R)](
        message, f, v, R, layout.rows, layout.columns, message.stride(0), message.stride(1),
        WORDS=_WORDS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return f, v
