"""Dequantize matrices: add up messages in the order of the ranks, divide, tile by tile.

Of each of ``K`` rows, ``out[i, j] = (sum over r of value * (f_r[i] * v_r[j])) / divisor`` in
float32, where a value is ``2 q + 1``, or of a group 1 or -1 where its code points and else 0. Terms
are exact, so a fused multiply-add rounds as an addition does, once; additions go from the first
message on, and the division is IEEE; where the divisor is a power of two, multiplying by its
inverse gives the same bits.

Worked example (2 bits, one element, 2 messages): codes 1 and -2 with f * v = 0.5 and 0.25 add up to
1.5 - 0.75; divided by 3, 0.25.

Two kernels: :mod:`.matrix_read_scales` unpacks the scales of rows and columns, and the sum's is
here. A program's tile is some rows of as many stretches of columns as a word has codes; where
neighbours share a code, of one such stretch, as lanes that are no power of two would leave threads
idle. A thread has some columns of all of the tile's rows, which share the columns' scales.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from tagc.ops.matrix import MatrixLayout

from .device import on_device_of
from .jit import jit, tl
from .matrix_numbers import unit_of
from .matrix_read_scales import read_scales

# Rows of a program's tile, and its columns, all stretches together.
_ROWS, _COLUMNS = 4, 1024
_WARPS = 4
# Arguments whose alignment makes no difference.
_PLAIN = [
    "codes", "f", "rows", "units", "R", "divisor", "mask", "message_stride", "message_next",
]  # fmt: skip


@jit
def values_of(words, f, mask, WIDTH: tl.constexpr):
    """What codes of int32 words ``[ROWS, 1, WORDS]`` stand for, times ``f`` ``[ROWS, 1, 1]``, as
    float32 ``[ROWS, LANES, WORDS]``.

    Codes of several bits become a part of a mantissa, as in :func:`.codes.codes_of`, but in units
    of half a code, for ``2 q + 1``. What the exponent stands for has few enough bits for an exact
    product with ``f`` if no code begins below bit 5; others turn around the word to get there.

    Args:
        mask: int32 scalar ``(1 << WIDTH) - 1``, see :func:`.codes.codes_of`.
    """
    LANES: tl.constexpr = 32 // WIDTH
    lane = tl.arange(0, LANES)[None, :, None]
    if WIDTH == 1:
        # The code -1 stands for -1, and 0 for 1.
        sign = (words << (31 - lane)) & -0x80000000
        return (f.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    else:
        FIRST: tl.constexpr = 5 + (-5) % WIDTH
        FIT: tl.constexpr = (23 - FIRST) // WIDTH
        turn = (lane * WIDTH - FIRST + 32) % 32 // (FIT * WIDTH) * (FIT * WIDTH)
        place = (lane * WIDTH - turn + 32) % 32
        u = words.to(tl.uint32, bitcast=True)
        turned = (u << ((32 - turn) % 32).to(tl.uint32)) | (u >> turn.to(tl.uint32))
        u = tl.where(turn == 0, u, turned)
        code = u & (mask.to(tl.uint32, bitcast=True) << place.to(tl.uint32))
        exponent = (127 + 24 - place) << 23
        half = 1 << (place + WIDTH - 1)
        m = (code ^ (exponent + half).to(tl.uint32)).to(tl.float32, bitcast=True)
        above = ((1 << (24 - place)) + (1 << WIDTH) - 1).to(tl.float32)
        return tl.fma(m, tl.broadcast_to(f, m.shape), tl.broadcast_to(-above * f, m.shape))


@jit(do_not_specialize=_PLAIN)
def dequantize_matrix_kernel(
    codes, f, v, out, rows, columns, units, R, divisor, mask, message_stride, message_next,
    out_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    WORDS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = WORDS * GROUP
    ALONE: tl.constexpr = LANES if GROUP > 1 else 1  # tiles that share the words
    row_words = units * UNIT
    across = (row_words + WORDS - 1) // WORDS * ALONE
    first = (tl.program_id(0) // across).to(tl.int64) * ROWS
    tile = tl.program_id(0) % across
    word = tile // ALONE * WORDS
    lane = tile % ALONE + tl.arange(0, LANES // ALONE)[None, :, None]
    r = first + tl.arange(0, ROWS)[:, None, None]
    e = tl.arange(0, SIZE)[None, None, :]
    w = word + tl.arange(0, WORDS)[None, None, :]
    j = (lane * row_words + word) * GROUP + e
    # In columns, not words, so that Triton sees how many neighbours are masked alike.
    within = (word * GROUP + e < row_words * GROUP) & (j < columns)
    exists = r < rows
    k = tl.program_id(1).to(tl.int64)
    f += k * R * rows + r
    v += k * R * columns + j
    codes += k * message_stride + r * row_words + w
    # No term is minus zero, so the sum may as well start from zero.
    total = tl.zeros([ROWS, LANES // ALONE, SIZE], tl.float32)
    # Becomes NaN in rows that are not finite, of which most elements have no term.
    divisor += tl.zeros([ROWS, 1, 1], tl.float32)
    for _ in range(0, R, STEPS):
        for _ in tl.static_range(STEPS):
            scale = tl.load(f, mask=exists, other=0.0)
            column = tl.broadcast_to(tl.load(v, mask=within, other=0.0), total.shape)
            words = tl.load(codes, mask=exists & (w < row_words), other=0)
            if GROUP == 1:
                total = tl.fma(values_of(words, scale, mask, WIDTH), column, total)
            else:
                # The sign is the code's upper bit.
                words = tl.reshape(words, [ROWS, WORDS, 1]) << (32 - WIDTH - lane * WIDTH)
                place = (words.to(tl.uint32, bitcast=True) >> (32 - WIDTH)).to(tl.int32)
                said = scale.to(tl.int32, bitcast=True) ^ (words & -0x80000000)
                hit = place % GROUP == tl.arange(0, GROUP)[None, None, :]
                said = tl.broadcast_to(said.to(tl.float32, bitcast=True), hit.shape)
                term = tl.fma(tl.reshape(said, total.shape), column, total)
                total = tl.where(tl.reshape(hit, total.shape), term, total)
                divisor += scale - scale
            f += rows
            v += columns
            codes += message_next
    total = tl.div_rn(total, tl.broadcast_to(divisor, total.shape)) if DIVIDE else total * divisor
    total = total.to(out.dtype.element_ty)
    tl.store(out + (k * out_stride + r * columns + j), total, mask=exists & within)


@on_device_of("out")
def dequantize_matrix(message: Tensor, out: Tensor, *, layout: MatrixLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`."""
    if not layout.rows:
        return
    f, v = read_scales(message, layout=layout)
    (K, R, _), lanes = message.shape, 32 // layout.width
    alone = 1 if layout.group == 1 else lanes
    each = lanes // alone * layout.group  # columns of a word in a tile
    words = min(_COLUMNS // each, triton.next_power_of_2(layout.row_words))
    tiles = triton.cdiv(layout.row_words, words) * alone
    unit = unit_of(layout.row_words)
    divide = divisor & (divisor - 1) != 0
    # Divisions, which are calls, and float32 elements take registers.
    rows = _ROWS // 2 if divide and out.dtype == torch.float32 else _ROWS
    dequantize_matrix_kernel[(triton.cdiv(layout.rows, rows) * tiles, K)](
        message[..., sum(layout.head) :], f, v, out, layout.rows, layout.columns,
        layout.row_words // unit, R, float(divisor) if divide else 1.0 / divisor,
        (1 << layout.width) - 1, message.stride(0), message.stride(1),
        # That of one row means nothing, and would hide how it is aligned.
        out.stride(0) if K > 1 else 0,
        WIDTH=layout.width, GROUP=layout.group, LANES=lanes, UNIT=unit, WORDS=words, ROWS=rows,
        STEPS=math.gcd(R, _steps(layout)), DIVIDE=divide,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _steps(layout: MatrixLayout) -> int:
    """Messages whose loads are in flight at a time, at most."""
    return 4 if layout.bits == 1 else 2
