"""Dequantize matrices: add up messages in the order of the ranks, divide, tile by tile.

For each of ``K`` rows, ``out[i, j] = (sum over r of value * (f_r[i] * v_r[j])) / divisor`` in
float32, where a value is ``2 q + 1``. Terms are exact, so a fused multiply-add rounds once, like an
addition. Additions start from the first message, and the division is IEEE. If the divisor is a
power of two, multiplying by its inverse gives the same bits.

Worked example (2 bits, one element, 2 messages): codes 1 and -2 with f * v = 0.5 and 0.25 add up to
1.5 - 0.75; divided by 3, 0.25.

There are two kernels, each launched once for matrices of several shapes. The first reads the heads
of messages: scales of rows as float32, and of columns as bfloat16, two in a word. Every element
needs both of each message, so they are unpacked once, not for every tile. A row that sends nothing
has the scale 0; a row that is not finite has NaN. Columns whose codes are next to each other in a
word share a word, so that the thread that sums both loads their scales at once. A program reads the
scales of some pairs of columns of one message, and some words of the rows' scales, if there are any
left.

Worked example (base 832): a row's byte 196 and the column's code 12 are the scales 3 and 0.375.

The second kernel sums. A program's tile is some rows of some words, with all columns whose codes
are in these words. A thread has some neighbouring words of all of the tile's rows, which share the
columns' scales, and some neighbouring lanes of these words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, AnyMatrices

from .dense import is_spoilt, sum_part
from .jit import cdiv, constant, division, jit, next_power_of_2, on_device_of, tl
from .lag import without_lag
from .matrix_numbers import INFINITY, row_scale, scale_of, unit_of, upper_of
from .matrix_runs import (
    Run,
    first_element,
    first_row,
    first_row_word,
    first_word,
    head_words,
    is_of_kind,
    programs_and_alike,
    programs_and_runs,
    runs_of,
    whose_matrix,
    words_of_row,
)
from .scalar import magnitude, widen
from .scratch import buffer

_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
_HEAD_WORDS = 128
HEAD_WARPS = 4
_OF_HEADS = [
    "message", "f", "v", "programs", "R", "message_stride", "message_next", "f_stride", "v_stride",
    "divisor", "stamp", "wrong", "table", "pieces", "tiles", "columns",
]  # fmt: skip


@jit(do_not_specialize=_OF_HEADS)
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


# Rows of a program's tile; lanes of a thread; words of the tile, in the lanes of all threads. All
# of a thread's loads from a message are in flight at once: with up to 254 registers, at least 8
# warps fit on a multiprocessor and wait for 32 KiB of codes.
_ROWS, _INNER, _WORDS = 4, 4, 512
# The most elements of a tile that a single warp has. Several of its threads may have the same
# element, or a thread may load one for another, which stores it.
_OF_WARP = constant(128)
# What every launch takes to compare stamps, also if another one sums the pieces.
_OF_STAMPS = "stamps", "stamp", "wrong", "stamps_next", "STAMPS"
# Arguments whose alignment makes no difference.
_OF_TILES = [
    "message", "f", "R", "divisor", "late", "lead", "mask", "message_stride", "message_next",
    "f_stride", "v_stride",
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

    Codes of several bits become part of a mantissa, as in :func:`.blocks.codes_at`, but in units of
    half a code, for ``2 q + 1``. The exponent's value has few enough bits for an exact product with
    ``f`` if no code begins below bit 5; words are rotated for that.

    Args:
        outer: int32, of the shape of ``words`` or one that broadcasts with it.
        mask: int32 scalar ``(1 << WIDTH) - 1``, see :func:`.blocks.codes_at`.
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


@jit(do_not_specialize=_OF_TILES)
def dequantize_matrix_kernel(
    message, f, v, out, sent, runs, R, divisor, late, lead, mask, message_stride, message_next,
    f_stride, v_stride, out_stride,
    WIDTH: tl.constexpr, SIZES: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    DIVIDE: tl.constexpr, ADD: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64)
    message += k * message_stride
    f += k * f_stride
    # Scales of two lanes share a word, see :func:`sum_matrices`.
    v += k * v_stride * (OUTER * INNER // 2)
    out += k * out_stride
    for i in tl.static_range(len(SIZES)):
        if is_of_kind(runs, i):
            sum_tile(
                runs[i], message, f, v, out, sent, R, divisor, late, lead, mask, message_next,
                WIDTH, SIZES, i, INNER, OUTER, DIVIDE, ADD, THREADS,
            )  # fmt: skip


@jit
def sum_tile(
    runs, message, f, v, out, sent, R, divisor, late, lead, mask, message_next,
    WIDTH: tl.constexpr, SIZES: tl.constexpr, KIND: tl.constexpr, INNER: tl.constexpr,
    OUTER: tl.constexpr, DIVIDE: tl.constexpr, ADD: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Sum a program's tile."""
    UNIT: tl.constexpr = SIZES[KIND][0]
    OF_WORDS: tl.constexpr = SIZES[KIND][1]
    WORDS: tl.constexpr = SIZES[KIND][2]
    NEXT: tl.constexpr = SIZES[KIND][3]
    ROWS: tl.constexpr = SIZES[KIND][4]
    # Whether several threads may have one element.
    SHARED: tl.constexpr = OUTER * WORDS <= _OF_WARP or OUTER * WORDS * 32 < _OF_WARP * THREADS
    run, m, tile = whose_matrix(runs)
    rows, columns = run.rows, run.columns * UNIT
    row_words = words_of_row(columns, OUTER * INNER, OF_WORDS)
    across = tl.cdiv(row_words, WORDS)
    # The last tile is moved back to cover only existing rows and words; those of other tiles are
    # also read, but not stored.
    begin = (tile // across).to(tl.int64) * ROWS
    first = tl.minimum(begin, rows - ROWS)
    outer = tl.arange(0, OUTER)[:, None, None]
    next = tl.arange(0, NEXT)[None, None, :]
    begins = tile % across * WORDS + tl.arange(0, WORDS // NEXT)[None, :, None] * NEXT
    # Repeated for all lanes, so that every load has its data in the right thread.
    begins = tl.broadcast_to(begins, [OUTER, WORDS // NEXT, 1])
    w = tl.minimum(begins, row_words - NEXT)
    _, before_codes = head_words(rows, columns)
    f += first_row(run, m, 0, R) + first
    v += first_row_word(run, m, 0, R, row_words) * (OUTER * INNER // 2)
    v += outer * (INNER // 2) * row_words + w
    codes = message + first_word(run, m, columns, row_words) + before_codes + first * row_words + w
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
    place = first_element(run, m, columns, UNIT) + first * columns
    out += place
    if sent is not None:
        sent += place
    j = outer * INNER * row_words + w + next
    for row in tl.static_range(ROWS):
        end = tl.where(first + row >= begin, columns, 0)
        for i in tl.static_range(INNER):
            x = totals[row * INNER + i]
            x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
            ours = (begins < row_words) & (j < end - i * row_words)
            at = row * columns + i * row_words + j
            if ADD:
                x += widen(tl.load(out + at, mask=ours))
            if sent is not None:
                last = tl.load(sent + at, mask=ours, other=0.0)
            if (ADD or sent is not None) and SHARED:
                # All threads must read an element before one writes it.
                tl.debug_barrier()
            if sent is not None:
                finite = magnitude(x) < INFINITY
                x = tl.where(finite, x, 0.0)
                tl.store(sent + at, x, mask=ours)
                x = tl.where(finite, without_lag(x, last, late, lead), float("nan"))
            tl.store(out + at, x.to(out.dtype.element_ty), mask=ours)


@on_device_of("out")
def dequantize_matrix(
    message: Tensor, out: Tensor, *, layout: AnyMatrices, divisor: int, add: bool = False
) -> None:
    """See :func:`tagc.ops.reference.dequantize_matrix`."""
    sum_matrices(message, out, layout, divisor, add)


def sum_matrices(
    message: Tensor,
    out: Tensor,
    layout: AnyMatrices,
    divisor: int,
    add: bool,
    sent: Tensor | None = None,
    lead: float = 1.0,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Launch matrices, and ``more`` programs for the pieces of each row.

    Args:
        sent, lead: as of :func:`tagc.ops.reference.undo_lag`, which ``out`` has the result of.
    """
    launches, total = runs_of(layout)
    (K, R, _), one = message.shape, layout.runs[0]
    factor, divide = division(divisor)
    pairs, outer = one.places // 2, one.places // _INNER
    # Scales of rows, matrix by matrix and message by message. And those of columns, of each message
    # as many pairs as a row of codes has places for: with m words in a row, entry p * m + i has
    # column 2 * p * m + i in its lower half, and the column m after it in its upper half. Past the
    # last column they are arbitrary.
    rows, row_words = R * total.rows, R * total.row_words
    f = buffer("matrix_f", (K, rows), torch.float32, message.device, None)
    v = buffer("matrix_v", (K, row_words * pairs), torch.int32, message.device, None)
    # Divisions (which are calls), codes of several bits, and float32 elements take registers.
    many = divide or sent is not None or one.bits > 1 or out.dtype == torch.float32
    most = _ROWS if many else 2 * _ROWS

    def sizes_of(run: Run) -> tuple[int, ...]:
        """``SIZES`` of :func:`sum_tile`."""
        m, unit = run.layout, unit_of(run.layout.row_words)
        words = min(_WORDS // outer, next_power_of_2(m.row_words))
        return run.unit, unit, words, min(4, unit), min(most, 1 << (m.rows.bit_length() - 1))

    if pieces:
        pieces |= {"divisor": factor, "DIVIDE": divide}
    for runs in launches:
        programs, numbers = programs_and_runs(
            runs, lambda m: cdiv(max(m.row_words * pairs, m.head[2]), _HEAD_WORDS)
        )
        matrix_read_scales_kernel[(programs + more, K * R)](
            message, f, v, numbers, programs, R, message.stride(0), message.stride(1), rows,
            row_words, PAIRS=pairs, WORDS=_HEAD_WORDS, **pieces, num_warps=HEAD_WARPS,
        )  # fmt: skip
        more, pieces = 0, {name: x for name, x in pieces.items() if name in _OF_STAMPS}

        programs, numbers, sizes = programs_and_alike(
            runs, sizes_of, lambda m, sizes: cdiv(m.rows, sizes[4]) * cdiv(m.row_words, sizes[2])
        )
        # A thread has 4 neighbours of each lane.
        warps = max(1, outer * max(words for _, _, words, *_ in sizes) // _OF_WARP.value)
        dequantize_matrix_kernel[(programs, K)](
            message, f, v, out, sent, numbers, R, factor, 1 - lead, lead, (1 << one.bits) - 1,
            message.stride(0), message.stride(1), rows, row_words,
            # The stride of a single row has no meaning, and would hide the alignment.
            out.stride(0) if K > 1 else 0,
            WIDTH=one.bits, SIZES=sizes, INNER=_INNER, OUTER=outer, DIVIDE=divide, ADD=add,
            THREADS=32 * warps, num_warps=warps,
        )  # fmt: skip
