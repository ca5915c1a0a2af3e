"""Dequantize matrices: add up messages in the order of the ranks, divide, tile by tile.

For each of ``K`` rows, ``out[i, j] = (sum over r of value * (f_r[i] * v_r[j])) / divisor`` in
float32, where a value is ``2 q + 1``. Terms are exact, so a fused multiply-add rounds once, like an
addition. Additions start from the first message, and the division is IEEE. If the divisor is a
power of two, multiplying by its inverse gives the same bits.

Worked example (2 bits, one element, 2 messages): codes 1 and -2 with f * v = 0.5 and 0.25 add up to
1.5 - 0.75; divided by 3, 0.25.

There are two kernels: :mod:`.matrix_read_scales` unpacks the scales of rows and columns, once for
matrices of all shapes; the sum's kernel is here. A program's tile is some rows of some words, with
all columns whose codes are in these words. A thread has some neighbouring words of all of the
tile's rows, which share the columns' scales, and some neighbouring lanes of these words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.matrix import AnyMatrices

from .device import on_device_of
from .jit import constant, jit, tl
from .matrix_numbers import unit_of
from .matrix_read_scales import read_scales
from .matrix_table import Run, runs_of
from .scalar import widen
from .sizes import cdiv, next_power_of_2

# Rows of a program's tile; lanes of a thread; words of the tile, in the lanes of all threads. All
# of a thread's loads from a message are in flight at once: with up to 254 registers, at least 8
# warps fit on a multiprocessor and wait for 32 KiB of codes.
_ROWS, _INNER, _WORDS = 4, 4, 512
# The most elements of a tile that a single warp has. Several of its threads may have the same
# element, or a thread may load one for another, which stores it.
_OF_WARP = constant(128)
# Arguments whose alignment makes no difference.
_PLAIN = [
    "codes", "f", "rows", "units", "R", "divisor", "mask", "message_stride", "message_next",
    "message_matrix", "f_stride", "v_words",
]  # fmt: skip


@jit
def value_of(word, f, mask, WIDTH: tl.constexpr, at: tl.constexpr):
    """The value of the code ``at`` of int32 words that begin at bit 5, times ``f``."""
    PLACE: tl.constexpr = 5 + at * WIDTH
    code = word & (mask << PLACE)
    # The code's upper bit is flipped, and its unit is the number's.
    m = (code ^ (((127 + 24 - PLACE) << 23) + (1 << (PLACE + WIDTH - 1)))).to(
        tl.float32, bitcast=True
    )
    above = f * -float((1 << (24 - PLACE)) + (1 << WIDTH) - 1)
    return tl.fma(m, tl.broadcast_to(f, m.shape), tl.broadcast_to(above, m.shape))


@jit
def values_of(words, outer, f, mask, WIDTH: tl.constexpr, INNER: tl.constexpr):
    """The values of the codes in lanes ``INNER * outer + i`` of int32 words, times ``f``: a float32
    tensor for each ``i``.

    Codes of several bits become part of a mantissa, as in :func:`.codes.codes_at`, but in units of
    half a code, for ``2 q + 1``. The exponent's value has few enough bits for an exact product with
    ``f`` if no code begins below bit 5; words are rotated for that.

    Args:
        outer: int32, of the shape of ``words`` or one that broadcasts with it.
        mask: int32 scalar ``(1 << WIDTH) - 1``, see :func:`.codes.codes_at`.
    """
    values = ()
    if WIDTH == 1:
        last = words << (32 - INNER - outer * INNER)
        for i in tl.static_range(INNER):
            # The code -1 stands for -1, and 0 for 1.
            sign = (last << (INNER - 1 - i)) & -0x80000000
            values += ((f.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True),)
    else:
        tl.static_assert(5 + INNER * WIDTH <= 23)
        turn = outer * INNER * WIDTH - 5
        u = words.to(tl.uint32, bitcast=True)
        u = (u >> (turn & 31).to(tl.uint32)) | (u << (-turn & 31).to(tl.uint32))
        for i in tl.static_range(INNER):
            values += (value_of(u.to(tl.int32, bitcast=True), f, mask, WIDTH, i),)
    return values


@jit(do_not_specialize=_PLAIN)
def dequantize_matrix_kernel(
    codes, f, v, out, rows, columns, units, R, divisor, mask, message_stride, message_next,
    message_matrix, f_stride, v_words, out_stride,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    WORDS: tl.constexpr, NEXT: tl.constexpr, ROWS: tl.constexpr, DIVIDE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    row_words = units * UNIT
    across = tl.cdiv(row_words, WORDS)
    # The last tile is moved back to cover only existing rows and words; those of other tiles are
    # also read, but not stored.
    begin = (tl.program_id(0) // across).to(tl.int64) * ROWS
    first = tl.minimum(begin, rows - ROWS)
    outer = tl.arange(0, OUTER)[:, None, None]
    next = tl.arange(0, NEXT)[None, None, :]
    begins = tl.program_id(0) % across * WORDS + tl.arange(0, WORDS // NEXT)[None, :, None] * NEXT
    # Repeated for all lanes, so that every load has its data in the right thread.
    begins = tl.broadcast_to(begins, [OUTER, WORDS // NEXT, 1])
    w = tl.minimum(begins, row_words - NEXT)
    k, m = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    f += k * f_stride + m * R * rows + first
    # Scales of two lanes share a word, see matrix_read_scales.py.
    v += (k * v_words + m * R * row_words) * (OUTER * INNER // 2)
    v += outer * (INNER // 2) * row_words + w
    codes += k * message_stride + m * message_matrix + first * row_words + w
    # No term is minus zero, so the sum may start from zero.
    totals = (tl.zeros([OUTER, WORDS // NEXT, NEXT], tl.float32),) * (ROWS * INNER)
    for _ in range(R):
        column = ()
        for i in tl.static_range(INNER // 2):
            both = tl.load(v + i * row_words + next)
            column += ((both << 16).to(tl.float32, bitcast=True),)
            column += ((both & -0x10000).to(tl.float32, bitcast=True),)
        added = ()
        for row in tl.static_range(ROWS):
            scale = tl.load(f + row)
            words = tl.load(codes + row * row_words + next)
            values = values_of(words, outer, scale, mask, WIDTH, INNER)
            for i in tl.static_range(INNER):
                added += (tl.fma(values[i], column[i], totals[row * INNER + i]),)
        totals = added
        f += rows
        v += OUTER * INNER // 2 * row_words
        codes += message_next
    out += k * out_stride + (m * rows + first) * columns
    j = outer * INNER * row_words + w + next
    for row in tl.static_range(ROWS):
        end = tl.where(first + row >= begin, columns, 0)
        for i in tl.static_range(INNER):
            x = totals[row * INNER + i]
            x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
            ours = (begins < row_words) & (j < end - i * row_words)
            at = out + row * columns + i * row_words + j
            if ADD:
                x += widen(tl.load(at, mask=ours))
                if OUTER * WORDS <= _OF_WARP:
                    # All threads must read an element before one writes it.
                    tl.debug_barrier()
            tl.store(at, x.to(out.dtype.element_ty), mask=ours)


@on_device_of("out")
def dequantize_matrix(
    message: Tensor, out: Tensor, *, layout: AnyMatrices, divisor: int, add: bool = False
) -> None:
    """See :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`."""
    runs, total = runs_of(layout)
    if not runs:
        return
    scales = read_scales(message, runs=runs, total=total)
    for run in runs:
        its = message[..., run.words].unflatten(2, (run.layout.count, -1))  # [K, R, count, words]
        _dequantize_rows(its, *scales, out[:, run.elements], run=run, divisor=divisor, add=add)


def _dequantize_rows(
    message: Tensor, f: Tensor, v: Tensor, out: Tensor, *, run: Run, divisor: int, add: bool
) -> None:
    """Dequantize the matrices of one shape, with scales of
    :func:`.matrix_read_scales.read_scales`."""
    layout, (K, R, count, _) = run.layout, message.shape
    outer = layout.places // _INNER
    words = min(_WORDS // outer, next_power_of_2(layout.row_words))
    tiles = cdiv(layout.row_words, words)
    unit = unit_of(layout.row_words)
    # A thread has 4 neighbours of each lane.
    warps = max(1, outer * words // _OF_WARP.value)
    divide = divisor & (divisor - 1) != 0
    # Divisions (which are calls), codes of several bits, and float32 elements take registers.
    many = divide or layout.bits > 1 or out.dtype == torch.float32
    rows = _ROWS if many else 2 * _ROWS
    rows = min(rows, 1 << (layout.rows.bit_length() - 1))
    pairs = layout.places // 2
    dequantize_matrix_kernel[(cdiv(layout.rows, rows) * tiles, K, count)](
        message[..., sum(layout.head) :], f[:, R * run.before.rows :],
        v[:, R * run.before.row_words * pairs :], out, layout.rows, layout.columns,
        layout.row_words // unit, R, float(divisor) if divide else 1.0 / divisor,
        (1 << layout.bits) - 1, *message.stride()[:3], f.stride(0), v.stride(0) // pairs,
        # The stride of a single row has no meaning, and would hide the alignment.
        out.stride(0) if K > 1 else 0,
        WIDTH=layout.bits, UNIT=unit, INNER=_INNER, OUTER=outer, WORDS=words,
        NEXT=min(4, unit), ROWS=rows, DIVIDE=divide, ADD=add, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
