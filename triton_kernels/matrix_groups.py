"""Dequantize matrices whose neighbours share a code: a place in the group, and a sign.

It works like :mod:`.matrix_dequantize`, but the value is 1 or -1 at a code's place, and 0 at the
other places. Rows that are not finite are all NaN, although most of their elements have no term.

Worked example (groups of 4, one row, 2 messages, f * v = 0.5 everywhere): if both codes point to
place 2, one of them with a sign, the group is 0, 0, 0, 0. If they point to 1 and 2, it is
0, 0.5, -0.5, 0, divided by 2.

A program has some rows of some groups, one after the other along the columns. A thread has one
group in all of the tile's rows, which share the columns' scales.
"""

from __future__ import annotations

from torch import Tensor

from .jit import jit, tl
from .matrix_table import Run
from .scalar import in_order, widen
from .sizes import cdiv

# Warps of a program, and rows of its tile.
_WARPS, _ROWS = 4, 8
# Arguments whose alignment makes no difference.
_PLAIN = [
    "codes", "f", "rows", "row_words", "R", "divisor", "message_stride", "message_next",
    "message_matrix", "f_stride", "v_words",
]  # fmt: skip


@jit
def columns_of(x, N: tl.constexpr):
    """The columns of ``[T, N]``, a tuple of ``[T]``."""
    if N == 1:
        return (tl.reshape(x, [x.numel]),)
    else:
        HALF: tl.constexpr = N // 2
        even, odd = tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
        even, odd = columns_of(even, HALF), columns_of(odd, HALF)
        both = ()
        for i in tl.static_range(HALF):
            both += (even[i], odd[i])
        return both


@jit(do_not_specialize=_PLAIN)
def dequantize_groups_kernel(
    codes, f, v, out, rows, columns, row_words, span, R, divisor, message_stride, message_next,
    message_matrix, f_stride, v_words, out_stride,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, THREADS: tl.constexpr, ROWS: tl.constexpr,
    DIVIDE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = GROUP // 2
    across = tl.cdiv(columns, THREADS * GROUP)
    # The last tile is moved back to cover only existing rows; rows of other tiles are not stored.
    begin = (tl.program_id(0) // across).to(tl.int64) * ROWS
    first = tl.minimum(begin, rows - ROWS)
    t = tl.program_id(0) % across * THREADS + tl.arange(0, THREADS)
    # Threads past the last group read the last group.
    group = tl.minimum(t, tl.cdiv(columns, GROUP) - 1)
    up = 32 - WIDTH - group // row_words * WIDTH
    k, m = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    f += k * f_stride + m * R * rows + first
    v += k * v_words * (32 // WIDTH * PAIRS) + m * R * span + (group * PAIRS)[:, None]
    codes += k * message_stride + m * message_matrix + first * row_words + group % row_words
    pair = tl.arange(0, PAIRS)[None, :]
    # Places are compared without a shift, below a code's sign.
    BELOW: tl.constexpr = 32 - WIDTH
    totals = (tl.zeros([THREADS], tl.float32),) * (ROWS * GROUP)
    spoilt = (tl.zeros([], tl.float32),) * ROWS
    for _ in range(R):
        column = ()
        both = columns_of(tl.load(v + pair), PAIRS)
        for i in tl.static_range(PAIRS):
            column += ((both[i] << 16).to(tl.float32, bitcast=True),)
            column += ((both[i] & -0x10000).to(tl.float32, bitcast=True),)
        added, seen = (), ()
        for row in tl.static_range(ROWS):
            scale = tl.load(f + row)
            code = tl.load(codes + row * row_words) << up
            # The sign is the code's upper bit.
            decoded = scale.to(tl.int32, bitcast=True) ^ (code & -0x80000000)
            decoded = decoded.to(tl.float32, bitcast=True)
            place = code & ((GROUP - 1) << BELOW)
            for e in tl.static_range(GROUP):
                total = totals[row * GROUP + e]
                term = tl.fma(decoded, column[e], total)
                added += (tl.where(place == (e << BELOW), term, total),)
            seen += (tl.fma(scale, 0.0, spoilt[row]),)
        totals, spoilt = added, seen
        f += rows
        v += span
        codes += message_next
    out += k * out_stride + (m * rows + first) * columns
    j = t[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for row in tl.static_range(ROWS):
        # The scale of rows that are not finite is NaN.
        over = divisor + spoilt[row]
        end = tl.where(first + row >= begin, columns, 0)
        some = ()
        for e in tl.static_range(GROUP):
            x = totals[row * GROUP + e]
            x = tl.div_rn(x, tl.zeros_like(x) + over) if DIVIDE else x * over
            some += (x if ADD else x.to(out.dtype.element_ty),)
        x = tl.reshape(in_order(some, GROUP), [THREADS, GROUP])
        if ADD:
            x += widen(tl.load(out + row * columns + j, mask=j < end))
            x = x.to(out.dtype.element_ty)
        tl.store(out + row * columns + j, x, mask=j < end)


def dequantize_groups(
    message: Tensor, f: Tensor, v: Tensor, out: Tensor, *, run: Run, divisor: int, add: bool
) -> None:
    """Dequantize ``[K, R, count, words]`` of one shape, with scales of
    :func:`.matrix_read_scales.read_scales`."""
    layout, (K, R, count, _) = run.layout, message.shape
    rows = min(_ROWS, 1 << (layout.rows.bit_length() - 1))
    threads = 32 * _WARPS
    tiles = cdiv(layout.codes, threads)
    divide = divisor & (divisor - 1) != 0
    pairs = layout.places * layout.group // 2
    dequantize_groups_kernel[(cdiv(layout.rows, rows) * tiles, K, count)](
        message[..., sum(layout.head) :], f[:, R * run.before.rows :],
        v[:, R * run.before.row_words * pairs :], out, layout.rows, layout.columns,
        layout.row_words, layout.row_words * pairs, R,
        float(divisor) if divide else 1.0 / divisor, *message.stride()[:3], f.stride(0),
        v.stride(0) // pairs,
        # The stride of a single row has no meaning, and would hide the alignment.
        out.stride(0) if K > 1 else 0,
        WIDTH=layout.width, GROUP=layout.group, THREADS=threads, ROWS=rows, DIVIDE=divide, ADD=add,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
