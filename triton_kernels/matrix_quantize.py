"""Quantize a matrix: sums of columns and their scales, then rows: sums, scales, codes, residual.

There are three kernels, each launched once for matrices of several shapes. They read gradient and
residual twice, by columns and by rows, because a row's scale needs the scales of all
columns. The rows' kernel is here. A program has some whole rows, in registers, as tables
``[places, words]`` like their codes, so that the elements are still there when the codes are
computed. A row's scale ``f`` follows from its sum. The codes of
``x = float32(grad) + float32(residual)`` in columns with the scale ``v`` are ``floor(y * 0.5)``,
clipped, with ``y = x * (1 / f) * (1 / v)``, and leave ``x - (2 q + 1) * f * v``.

Worked example (2 bits, f = 0.5): x = (1.7, -0.4) with v = (1, 0.5) is (3.4, -1.6) in units of
f * v, so the codes are (1, -1), which stand for (1.5, -0.25) and leave (0.2, -0.15).

Rows too long for registers are read twice here, some words at a time: once for the sum, and again
for the codes, soon enough to be still in the cache.

Products ``(2 q + 1) * f * v`` are exact, so a fused multiply-add gives the same bits as a
subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tagc.ops.matrix import NOT_FINITE, NOTHING, AnyMatrices

from .jit import cdiv, constant, jit, next_power_of_2, on_device_of, row_stride, tl
from .matrix_columns import columns_at_a_time, sum_columns
from .matrix_numbers import (
    INFINITY,
    LARGEST_BITS,
    inverse_of,
    row_scale,
    scale_of,
    sum_table,
    unit_of,
)
from .matrix_runs import (
    Run,
    first_column,
    first_element,
    first_word,
    head_words,
    is_of_kind,
    programs_and_alike,
    runs_of,
    whose_matrix,
    words_of_row,
)
from .matrix_scales import write_scales
from .scalar import magnitude, narrow_finite, negated, widen
from .scratch import buffer

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
_PLAIN = ["message", "norms", "distance", "message_stride"]


@jit
def code_and_left(x, f, inverse_f, v, inverse_v, shift, WIDTH: tl.constexpr):
    """Codes of ``x`` ``[ROWS, PLACES, COLUMNS]``, int32 with ``WIDTH`` bits at their place in the
    word, and their quantization errors, rounded once. Scales and shifts broadcast."""
    y = x * inverse_f * inverse_v
    v = tl.broadcast_to(v, x.shape)
    if WIDTH == 1:
        negative = y < _LEAST
        f = tl.where(negative, f, negated(f))
        return tl.where(negative, tl.full([1, 1, 1], 1, tl.int32) << shift, 0), tl.fma(f, v, x)
    else:
        HALF: tl.constexpr = 1 << (WIDTH - 1)
        y = tl.minimum(tl.maximum(y * 0.5, -HALF), HALF - 1)
        nearest = y + _INTEGER
        nearest = tl.where(nearest - _INTEGER > y, nearest - 1.0, nearest)
        q = nearest - _INTEGER
        code = nearest.to(tl.int32, bitcast=True) & ((1 << WIDTH) - 1)
        return code << shift, tl.fma(q + q + 1.0, negated(f) * v, x)


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
    """Codes as ``[ROWS, WORDS]`` int32, and their quantization errors."""
    # Elements past the row's end are zeros, whose codes are 0.
    v, inverse_v = scale_of(upper), inverse_of(upper)
    code, left = code_and_left(x, f, inverse_f, v, inverse_v, place * WIDTH, WIDTH)
    return tl.where(sends[:, None], tl.sum(code, 1), 0), left


@jit(do_not_specialize=_PLAIN)
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
    """See :meth:`tagc.ops.matrix.MatrixOps.quantize_matrix`."""
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
    """Launch matrices, and ``more`` programs for the pieces of each row."""
    D, (launches, total) = grad.shape[0], runs_of(layout)
    tile, columns = columns_at_a_time(total.columns, D), (D, total.columns)
    sums, tops, uppers, norms = (
        buffer(f"matrix_{name}", columns, dtype, grad.device, None)
        for name, dtype in (
            ("sums", torch.float32), ("tops", torch.int32), ("uppers", torch.int16),
            ("norms", torch.float32),
        )
    )  # fmt: skip
    for runs in launches:
        sum_columns(grad, residual, sums, tops, runs=runs, tile=tile)
        write_scales(sums, tops, message, uppers, norms, runs=runs, tile=tile, more=more, **pieces)
        more, pieces = 0, {}
        _quantize_rows(grad, residual, message, uppers, norms, runs, average)


def _quantize_rows(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    uppers: Tensor,
    norms: Tensor,
    runs: Sequence[Run],
    average: float,
) -> None:
    """Quantize the rows of matrices."""
    layout = runs[0].layout
    programs, numbers, sizes = programs_and_alike(
        runs, _sizes, lambda m, sizes: cdiv(m.rows, sizes[2])
    )
    elements = layout.places * max(rows * words for _, _, rows, words, *_ in sizes)
    # Accesses that are not aligned take more registers.
    aligned = all(min(unit, of_words) >= 8 for unit, of_words, *_ in sizes)
    warps = max(1, elements // (_OF_WARP if aligned else _OF_WARP // 2))
    narrow = grad.itemsize == 2 and (residual is None or residual.itemsize == 2)
    quantize_matrix_kernel[(programs, len(grad))](
        grad, residual, uppers, norms, message, numbers, layout.distance, average, 1 - average,
        grad.stride(0), row_stride(residual), message.stride(0), uppers.stride(0),
        WIDTH=layout.bits, FITTED=layout.fitted, SIZES=sizes,
        LOG_PLACES=layout.places.bit_length() - 1, AVERAGE=average != 0, THREADS=32 * warps,
        num_warps=warps, maxnreg=_REGISTERS if aligned and narrow else None,
    )  # fmt: skip


def _sizes(run: Run) -> tuple[int, ...]:
    """``SIZES`` of :func:`quantize_rows`."""
    m, words = run.layout, run.layout.words_at_a_time
    rows = min(max(1, _ELEMENTS // (words * m.places)), next_power_of_2(m.rows))
    return (
        run.unit, unit_of(m.row_words), rows, words, words.bit_length() - 1, words >= m.row_words,
    )  # fmt: skip
