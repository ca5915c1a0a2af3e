"""The head of a quantized matrix's message: base, scales of columns and of rows.

The largest sum of a row, divided by the sum of the columns' scales, is ``a``; the base is 8 times
its biased exponent, minus ``CENTRE``, or 0 if ``a`` is below ``MIN_MEAN``. A row's byte is the
upper bits of its scale minus the base, at most 254, and ``NOTHING`` below 1.

Worked example: a = 5 has the biased exponent 129 and the base 832; a row with the scale 3, of which
the upper 12 bits are 1028, has the byte 196.

A program writes some words, of the columns' scales and of the rows', whichever there are. The
columns' scales and their inverses are written as float32 as well, for every element needs them.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.matrix import CENTRE, MIN_MEAN, NOT_FINITE, NOTHING, MatrixLayout

from .jit import constant, jit, tl
from .matrix_numbers import column_code, column_inverse, column_scale, largest_of
from .matrix_rows import NO_FIT

_CENTRE = constant(CENTRE)
_MIN_MEAN = constant(MIN_MEAN)
_NO_FIT = constant(NO_FIT)
_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
_WORDS = 128
_WARPS = 4
_PLAIN = [
    "sums", "tops", "fits", "largest", "norms", "message", "v", "inverse_v", "rows", "columns",
    "column_tiles", "row_tiles", "message_stride",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def matrix_scales_kernel(
    sums, tops, fits, largest, norms, message, v, inverse_v, rows, columns, column_tiles, row_tiles,
    message_stride, WORDS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    message += d * message_stride
    top = largest_of(tops + d * column_tiles, column_tiles)
    most = tl.full([1], 0, tl.int32) + largest_of(largest + d * row_tiles, row_tiles)
    mean = most.to(tl.float32, bitcast=True)
    mean = tl.div_rn(mean, tl.load(norms + d + tl.arange(0, 1)))
    base = 8 * (mean.to(tl.int32, bitcast=True) >> 23) - _CENTRE
    base = tl.where(mean < _MIN_MEAN, 0, base)
    if tl.program_id(0) == 0:
        tl.store(message + tl.arange(0, 1), base)

    lane = tl.arange(0, 8)[None, :]
    j = word[:, None] * 8 + lane
    total = tl.load(sums + d * columns + j, mask=j < columns, other=0.0)
    code = tl.where(j < columns, column_code(total, top), 0)
    tl.store(v + d * columns + j, column_scale(code), mask=j < columns)
    tl.store(inverse_v + d * columns + j, column_inverse(code), mask=j < columns)
    code = code.to(tl.uint32, bitcast=True)
    words = tl.sum(code << (4 * lane).to(tl.uint32), 1).to(tl.int32, bitcast=True)
    column_words = (columns + 7) // 8
    tl.store(message + 1 + word, words, mask=word < column_words)

    lane = tl.arange(0, 4)[None, :]
    i = word[:, None] * 4 + lane
    fit = tl.load(fits + d * rows + i, mask=i < rows, other=0)
    byte = fit - base[:, None]
    byte = tl.where((byte < 1) | (base[:, None] == 0), _NOTHING, tl.minimum(byte, 254))
    byte = tl.where(fit == _NO_FIT, _NOT_FINITE, byte).to(tl.uint32, bitcast=True)
    words = tl.sum(byte << (8 * lane).to(tl.uint32), 1).to(tl.int32, bitcast=True)
    tl.store(message + 1 + column_words + word, words, mask=word < (rows + 3) // 4)


def write_scales(
    sums: Tensor,
    tops: Tensor,
    fits: Tensor,
    largest: Tensor,
    norms: Tensor,
    message: Tensor,
    v: Tensor,
    inverse_v: Tensor,
    *,
    layout: MatrixLayout,
) -> None:
    """Write the head of ``message`` ``[D, words]`` int32, and the columns' scales ``v`` and their
    inverses, both ``[D, columns]`` float32.

    The others are from :func:`.matrix_columns.sum_columns` and :func:`.matrix_rows.fit_rows`.
    """
    words = max(layout.head)
    matrix_scales_kernel[(triton.cdiv(words, _WORDS), message.shape[0])](
        sums, tops, fits, largest, norms, message, v, inverse_v, layout.rows, layout.columns,
        tops.shape[1], largest.shape[1], message.stride(0),
        WORDS=_WORDS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
