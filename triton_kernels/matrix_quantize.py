"""Quantize matrices: sums of columns and their scales, then rows: sums, scales, codes, residual.

There are three kernels, each launched once for matrices of several shapes. They read gradient and
residual twice, by columns and by rows, because a row's scale needs the scales of all columns.

**Columns.** ``sums[j] = sum over i of u[i, j]`` in ``COLUMN_LANES`` lanes; lane ``l`` adds up the
rows ``l``, ``l + COLUMN_LANES``, and so on. A program owns some columns and walks down all rows,
one row per lane at a time. Worked example (2 lanes): a column with the magnitudes 1, 2, 3, 4, 5 has
the lanes 1 + 3 + 5 and 2 + 4, and the sum 9 + 6.

**Heads** of messages. The base is ``8 * a - CENTRE``, where ``a`` is the biased exponent of the
largest column's sum (rounded to half octaves) minus the logarithm of the number of rows, rounded
down. The base is 0 if ``a`` is below ``MIN_EXPONENT``. A program writes some words of the columns'
scales and of the rows' scales, if there are any left. The rows' bytes are zeros, which the rows'
kernel fills in. The columns' scales are also written as upper bits, because every element needs
them. All rows divide by the same sum over columns, which the first program computes. Worked
example: 20 rows and a largest sum of 100, which rounds to 96, of the biased exponent 133; 16 rows
are 2**4, so the exponent is 129 and the base 8 * 129 - 136 = 896.

**Rows.** A program has some whole rows, in registers, as tables ``[places, words]`` like their
codes, so that the elements are still there when the codes are computed. A row's scale ``f`` follows
from its sum. The codes of ``x = float32(grad) + float32(residual)`` in columns with the scale ``v``
are ``floor(y * 0.5)``, clipped, with ``y = x * (1 / f) * (1 / v)``, and leave
``x - (2 q + 1) * f * v``. These products are exact, so a fused multiply-add gives the same bits as
a subtraction. Worked example (2 bits, f = 0.5): x = (1.7, -0.4) with v = (1, 0.5) is (3.4, -1.6) in
units of f * v, so the codes are (1, -1), which stand for (1.5, -0.25) and leave (0.2, -0.15).

Rows too long for registers are read twice, some words at a time: once for the sum, and again for
the codes, soon enough to be still in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tagc.ops.matrix import CENTRE, COLUMN_LANES, MIN_EXPONENT, NOT_FINITE, NOTHING, AnyMatrices

from .dense import put_or_note
from .jit import cdiv, constant, jit, next_power_of_2, on_device_of, row_stride, tl
from .matrix_numbers import (
    INFINITY,
    LARGEST_BITS,
    bounded,
    column_code,
    column_upper,
    inverse_of,
    largest_of,
    load_x,
    pairs,
    row_scale,
    scale_of,
    sum_table,
    unit_of,
    upper_of,
)
from .matrix_runs import (
    Run,
    first_column,
    first_element,
    first_word,
    head_words,
    is_of_kind,
    programs_and_alike,
    programs_and_runs,
    runs_of,
    whose_matrix,
    words_of_row,
)
from .scalar import magnitude, narrow_finite, negated, widen
from .scratch import buffer

# Columns of a program, 64 or 128 bytes of bfloat16; fewer columns give more programs. Lanes are
# chains of additions, so only columns and lanes can be divided among threads.
_COLUMNS = 32, 64
# Enough programs for an H100's 132 processors, 2 each.
_PROGRAMS = 264
# Further destinations do not count, because the check before training uses no more.
_MOST_DESTINATIONS = 8
# Elements of a thread that are loaded before the first addition; loads in flight hide latency.
_IN_FLIGHT = 32
_COLUMN_WARPS = 4
_LOG = COLUMN_LANES.bit_length() - 1


@jit(do_not_specialize=["tops"])
def matrix_columns_kernel(
    grad, residual, sums, tops, runs, grad_stride, residual_stride, columns_stride,
    LOG: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << LOG
    d = tl.program_id(1).to(tl.int64)
    run, m, tile = whose_matrix(runs)
    rows, columns = run.rows, run.columns * UNIT
    j = tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, LANES)
    first = first_element(run, m, columns, UNIT)
    grad += d * grad_stride + first
    if residual is not None:
        residual += d * residual_stride + first
    total = tl.zeros([LANES, COLUMNS], tl.float32)
    for begin in range(0, rows, LANES * STEPS):
        for step in tl.static_range(STEPS):
            i = begin + step * LANES + lane
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            at = i.to(tl.int64)[:, None] * columns + j[None, :]
            total += bounded(load_x(grad, residual, at, inside))
    found = pairs(tl.trans(total), LOG)
    column = first_column(run, m, columns, UNIT)
    tl.store(sums + d * columns_stride + column + j, found, mask=j < columns)
    tl.store(tops + d * columns_stride + column + tile, tl.max(column_upper(found), 0))


def columns_at_a_time(columns: int, D: int) -> int:
    """Columns of a program, if all matrices have so many, for each of ``D`` destinations."""
    few, many = _COLUMNS
    return many if min(D, _MOST_DESTINATIONS) * columns >= _PROGRAMS * many else few


_CENTRE = constant(CENTRE)
_MIN_EXPONENT = constant(MIN_EXPONENT)
_HEAD_WORDS = 128
# Elements per warp of the sum over columns, and the fewest warps.
_TERMS_OF_WARP, _FEWEST_WARPS = 512, 4
_OF_HEADS = [
    "column_sums", "tops", "message", "uppers", "norms", "programs", "message_stride",
    "columns_stride", "stamp", "table", "pieces", "tiles", "messages", "puts", "words", "rest",
    "parts",
]  # fmt: skip


@jit(do_not_specialize=_OF_HEADS)
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
    return max(_FEWEST_WARPS, elements // _TERMS_OF_WARP)


_NOTHING = constant(NOTHING)
_NOT_FINITE = constant(NOT_FINITE)
# The largest negative float32; half of any smaller one is below zero.
_LEAST = constant(-(2.0**-149))
# Added to a small float32, it leaves the integer in the lowest bits, in two's complement.
_INTEGER = constant(1.5 * 2**23)
# Elements of a program, unless rows are longer, and of a warp.
_ELEMENTS, _OF_WARP = 4096, 1024
# With so many of them three programs fit on a multiprocessor. For several kinds of aligned rows of
# 16-bit numbers the compiler would use more, and spills at most 16 bytes with these; others would
# spill a lot.
_REGISTERS = 168
# Arguments whose alignment makes no difference.
_OF_ROWS = ["message", "norms", "distance", "message_stride"]


@jit
def stands_for(x, v, FITTED: tl.constexpr):
    """The terms of a row's sum."""
    # The term of an element that is not finite does not matter: its row sends no codes.
    u = tl.minimum(magnitude(x), LARGEST_BITS).to(tl.float32, bitcast=True)
    return u * v if FITTED else u


@jit
def load_words(grad, residual, uppers, start, exists, place, w, row_words, columns):
    """``x``, the residual (``x`` if there is none) and the upper bits of ``v`` of the elements
    of words ``w`` at places; 0 for missing elements."""
    j = place * row_words + w
    within = (w < row_words) & (j < columns)
    inside = exists[:, None, None] & within
    x = widen(tl.load(grad + (start + j), mask=inside, other=0.0))
    old = x
    if residual is not None:
        old = widen(tl.load(residual + (start + j), mask=inside, other=0.0))
        x += old
    return x, old, tl.load(uppers + j, mask=within, other=0).to(tl.int32)


@jit
def store_words(residual, left, old, kept, fresh, start, stored, place, w, row_words, columns,
                AVERAGE: tl.constexpr):  # fmt: skip
    """Store the new residual."""
    j = place * row_words + w
    if AVERAGE:
        left = kept * old + fresh * left
    left = narrow_finite(left, residual.dtype.element_ty)
    within = (w < row_words) & (j < columns)
    tl.store(residual + (start + j), left, mask=stored & within)


@jit
def say(x, f, inverse_f, sends, upper, place, WIDTH: tl.constexpr):
    """Codes of ``x`` ``[ROWS, PLACES, WORDS]`` as words ``[ROWS, WORDS]`` int32, and their
    quantization errors, rounded once."""
    # Elements past the row's end are zeros, whose codes are 0.
    v, inverse_v, shift = scale_of(upper), inverse_of(upper), place * WIDTH
    y = x * inverse_f * inverse_v
    v = tl.broadcast_to(v, x.shape)
    if WIDTH == 1:
        negative = y < _LEAST
        f = tl.where(negative, f, negated(f))
        code = tl.where(negative, tl.full([1, 1, 1], 1, tl.int32) << shift, 0)
        left = tl.fma(f, v, x)
    else:
        HALF: tl.constexpr = 1 << (WIDTH - 1)
        y = tl.minimum(tl.maximum(y * 0.5, -HALF), HALF - 1)
        nearest = y + _INTEGER
        nearest = tl.where(nearest - _INTEGER > y, nearest - 1.0, nearest)
        q = nearest - _INTEGER
        code = (nearest.to(tl.int32, bitcast=True) & ((1 << WIDTH) - 1)) << shift
        left = tl.fma(q + q + 1.0, negated(f) * v, x)
    return tl.where(sends[:, None], tl.sum(code, 1), 0), left


@jit(do_not_specialize=_OF_ROWS)
def quantize_matrix_kernel(
    grad, residual, uppers, norms, message, runs, distance, kept, fresh, grad_stride,
    residual_stride, message_stride, columns_stride,
    WIDTH: tl.constexpr, FITTED: tl.constexpr, SIZES: tl.constexpr, LOG_PLACES: tl.constexpr,
    AVERAGE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    uppers += d * columns_stride
    norms += d * columns_stride
    message += d * message_stride
    for i in tl.static_range(len(SIZES)):
        if is_of_kind(runs, i):
            quantize_rows(
                runs[i], grad, residual, uppers, norms, message, distance, kept, fresh, WIDTH,
                FITTED, SIZES, i, LOG_PLACES, AVERAGE, THREADS,
            )  # fmt: skip


@jit
def quantize_rows(
    runs, grad, residual, uppers, norms, message, distance, kept, fresh,
    WIDTH: tl.constexpr, FITTED: tl.constexpr, SIZES: tl.constexpr, KIND: tl.constexpr,
    LOG_PLACES: tl.constexpr, AVERAGE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Quantize a program's rows."""
    UNIT: tl.constexpr = SIZES[KIND][0]
    OF_WORDS: tl.constexpr = SIZES[KIND][1]
    ROWS: tl.constexpr = SIZES[KIND][2]
    WORDS: tl.constexpr = SIZES[KIND][3]
    LOG_WORDS: tl.constexpr = SIZES[KIND][4]
    WHOLE: tl.constexpr = SIZES[KIND][5]
    ELEMENTS: tl.constexpr = (ROWS * WORDS) << LOG_PLACES
    run, m, tile = whose_matrix(runs)
    rows, columns = run.rows, run.columns * UNIT
    row_words = words_of_row(columns, 1 << LOG_PLACES, OF_WORDS)
    first_row = tile.to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    exists = r < rows - first_row
    place = tl.arange(0, 1 << LOG_PLACES)[None, :, None]
    w = tl.arange(0, WORDS)[None, None, :]
    flat = tl.arange(0, WORDS)[None, :]
    first = first_element(run, m, columns, UNIT)
    grad += first
    if residual is not None:
        residual += first
    first = first_column(run, m, columns, UNIT)
    uppers += first
    norms += first
    message += first_word(run, m, columns, row_words)
    before_rows, before_codes = head_words(rows, columns)
    scales = (message + before_rows).to(tl.pointer_type(tl.uint8), bitcast=True)
    codes = message + before_codes
    start = (first_row + r)[:, None, None] * columns
    at_words = (first_row + r)[:, None] * row_words + flat

    if WHOLE:
        x, old, upper = load_words(
            grad, residual, uppers, start, exists, place, w, row_words, columns
        )
        worst = tl.max(tl.max(magnitude(x), 2), 1)
        table = stands_for(x, scale_of(upper), FITTED)
    else:
        table = tl.zeros([ROWS, 1 << LOG_PLACES, WORDS], tl.float32)
        worst = tl.zeros([ROWS], tl.int32)
        for word in range(0, row_words, WORDS):
            x, old, upper = load_words(
                grad, residual, uppers, start, exists, place, word + w, row_words, columns
            )
            worst = tl.maximum(worst, tl.max(tl.max(magnitude(x), 2), 1))
            table += stands_for(x, scale_of(upper), FITTED)

    total = sum_table(table, LOG_PLACES, LOG_WORDS)
    norms = tl.broadcast_to(tl.load(norms), [ROWS])
    base = tl.load(message)
    byte = tl.div_rn(total, norms) * distance
    byte = ((byte.to(tl.int32, bitcast=True) + (1 << 19)) >> 20) - base
    byte = tl.where((byte < 1) | (base == 0), _NOTHING, tl.minimum(byte, 254))
    byte = tl.where(worst < INFINITY, byte, _NOT_FINITE)
    tl.store(scales + first_row + r, byte.to(tl.uint8), mask=exists)
    sends = (byte != _NOTHING) & (byte != _NOT_FINITE)
    one = tl.full([ROWS], 1.0, tl.float32)
    f = row_scale(byte, base)
    inverse_f = tl.div_rn(one, tl.where(sends, f, one))[:, None, None]
    f = tl.where(sends, f, 0.0)[:, None, None]  # leaves x as it is
    stored = (exists & (byte != _NOT_FINITE))[:, None, None]

    if WHOLE:
        if residual is not None and ELEMENTS < THREADS:
            # Several threads may have the same element: all must read it before one writes.
            tl.debug_barrier()
        words, left = say(x, f, inverse_f, sends, upper, place, WIDTH)
        if residual is not None:
            store_words(
                residual, left, old, kept, fresh, start, stored, place, w, row_words, columns,
                AVERAGE,
            )  # fmt: skip
        tl.store(codes + at_words, words, mask=exists[:, None] & (flat < row_words))
    else:
        for word in range(0, row_words, WORDS):
            x, old, upper = load_words(
                grad, residual, uppers, start, exists, place, word + w, row_words, columns
            )
            words, left = say(x, f, inverse_f, sends, upper, place, WIDTH)
            if residual is not None:
                store_words(
                    residual, left, old, kept, fresh, start, stored, place, word + w, row_words,
                    columns, AVERAGE,
                )  # fmt: skip
            inside = exists[:, None] & (flat < row_words - word)
            tl.store(codes + (at_words + word), words, mask=inside)


@on_device_of("grad")
def quantize_matrix(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: AnyMatrices,
    average: float,
) -> None:
    """See :func:`tagc.ops.reference.quantize_matrix`."""
    quantize_matrices(grad, residual, message, layout, average)


def quantize_matrices(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    layout: AnyMatrices,
    average: float,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Launch matrices, and ``more`` programs for the pieces of each row, see :mod:`.merged`."""
    D, one, (launches, total) = grad.shape[0], layout.runs[0], runs_of(layout)
    tile, columns = columns_at_a_time(total.columns, D), (D, total.columns)
    # Sums of columns; of each matrix at its first columns, the largest upper bits of each program's
    # sums; the upper bits of the columns' scales; at its first column, the divisor of rows' sums.
    sums, tops, uppers, norms = (
        buffer(f"matrix_{name}", columns, dtype, grad.device, None)
        for name, dtype in (
            ("sums", torch.float32), ("tops", torch.int32), ("uppers", torch.int16),
            ("norms", torch.float32),
        )
    )  # fmt: skip
    log_places, stride = one.places.bit_length() - 1, total.columns
    narrow = grad.itemsize == 2 and (residual is None or residual.itemsize == 2)
    for runs in launches:
        # Matrices with other units are another launch, so that all of one are as aligned as can be.
        for unit in {run.unit: None for run in runs}:
            some = [run for run in runs if run.unit == unit]
            programs, numbers = programs_and_runs(some, lambda m: cdiv(m.columns, tile), unit)
            steps = 32 * _COLUMN_WARPS * _IN_FLIGHT // (tile * COLUMN_LANES)
            matrix_columns_kernel[(programs, D)](
                grad, residual, sums, tops, numbers, grad.stride(0), row_stride(residual), stride,
                LOG=_LOG, COLUMNS=tile, STEPS=steps, UNIT=unit, num_warps=_COLUMN_WARPS,
            )  # fmt: skip

        words = max(run.layout.words_at_a_time for run in runs)
        programs, numbers = programs_and_runs(runs, lambda m: cdiv(max(m.head), _HEAD_WORDS))
        matrix_scales_kernel[(programs + more, D)](
            sums, tops, message, uppers, norms, numbers, programs, message.stride(0), stride,
            FITTED=one.fitted, LOG_PLACES=log_places, LOG_WORDS=words.bit_length() - 1,
            WORDS=_HEAD_WORDS, COLUMNS=tile, **pieces, num_warps=warps_of(runs),
        )  # fmt: skip
        more, pieces = 0, {}

        programs, numbers, sizes = programs_and_alike(
            runs, _sizes, lambda m, sizes: cdiv(m.rows, sizes[2])
        )
        elements = one.places * max(rows * words for _, _, rows, words, *_ in sizes)
        # Accesses that are not aligned take more registers.
        aligned = all(min(unit, of_words) >= 8 for unit, of_words, *_ in sizes)
        warps = max(1, elements // (_OF_WARP if aligned else _OF_WARP // 2))
        quantize_matrix_kernel[(programs, D)](
            grad, residual, uppers, norms, message, numbers, one.distance, average, 1 - average,
            grad.stride(0), row_stride(residual), message.stride(0), stride,
            WIDTH=one.bits, FITTED=one.fitted, SIZES=sizes, LOG_PLACES=log_places,
            AVERAGE=average != 0, THREADS=32 * warps, num_warps=warps,
            maxnreg=_REGISTERS if aligned and narrow else None,
        )  # fmt: skip


def _sizes(run: Run) -> tuple[int, ...]:
    """``SIZES`` of :func:`quantize_rows`."""
    m, words = run.layout, run.layout.words_at_a_time
    rows = min(max(1, _ELEMENTS // (words * m.places)), next_power_of_2(m.rows))
    return (
        run.unit, unit_of(m.row_words), rows, words, words.bit_length() - 1, words >= m.row_words,
    )  # fmt: skip
