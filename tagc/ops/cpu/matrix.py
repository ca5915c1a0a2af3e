"""The operators of quantized matrices: rows are quantized one by one, and added up one by one.

Gradient and residual are read twice, because a row's codes need the scales of all columns.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable
from torch import Tensor

from tagc.ops.cpu.arrays import (
    ABS,
    INF,
    F,
    N,
    U,
    bits_of,
    compiled,
    float_of,
    group_of,
    load,
    numpy_of,
    rows_of,
    shift_left,
    shift_right,
    signed_code,
    store_finite,
    widened,
    words_of,
    write_average,
)
from tagc.ops.matrix import (
    CENTRE,
    COLUMN_BIAS,
    COLUMN_LANES,
    LARGEST,
    MIN_EXPONENT,
    NOT_FINITE,
    NOTHING,
    AnyMatrices,
    parts_of,
)

_LARGEST = U(np.float32(LARGEST).view(np.uint32))
_ONE, _TWO, _HALF = F(1.0), F(2.0), F(0.5)


def quantize_matrix(
    grad: Tensor,
    residual: Tensor | None,
    message: Tensor,
    *,
    layout: AnyMatrices,
    average: float,
) -> None:
    g, e = numpy_of(widened(grad)), numpy_of(residual)
    for one, elements, words in parts_of(layout):
        if not one.rows:
            continue
        v = np.empty(one.columns, np.float32)
        table = np.empty(2 * one.places * one.words_at_a_time, np.float32)
        sizes = [*one.head, one.rows * one.row_words]
        heads, columns, rows, codes = map(words_of, message[:, words].split(sizes, dim=-1))
        for d in range(grad.shape[0]):
            x, left = g[d, elements], None if e is None else e[d, elements]
            base = _find_columns(x, left, one.rows, v, columns[d])
            heads[d, 0] = base
            _quantize_rows(
                x, left, one.rows, v, U(base), group_of(one.places),
                F(one.distance), F(average), F(1 - average), table, rows[d], codes[d],
            )  # fmt: skip


def dequantize_matrix(
    message: Tensor, out: Tensor, *, layout: AnyMatrices, divisor: int, add: bool = False
) -> None:
    wide = widened(out)
    rows = numpy_of(wide)
    for one, elements, words in parts_of(layout):
        if not one.rows:
            continue
        for k in range(message.shape[0]):
            messages, stride = rows_of(message[k, :, words])
            _dequantize_rows(
                messages, stride, message.shape[1], one.rows, group_of(one.places), F(divisor), add,
                rows[k, elements],
            )  # fmt: skip
    if wide is not out:
        out.copy_(wide)


# LLVM inlines the helpers; numba's own inlining warns of assignments in loops and branches.


@register_jitable
def _bounded(x):
    """Magnitude of float32 ``x``, 0 if it is not finite, and at most ``LARGEST``."""
    b = U(bits_of(x) & ABS)
    return float_of(b if b < _LARGEST else (_LARGEST if b < INF else U(0)))


@register_jitable
def _rounded_upper(x, bits):
    """The upper ``bits`` of float32 ``x``, rounded."""
    below = U(32) - U(bits)
    return shift_right(U(bits_of(x) + U(U(1) << U(below - U(1)))), below)


@register_jitable
def code_sum(c, lanes, words, table):
    """Sum of one number for every element of a row, in the order of
    :attr:`tagc.ops.matrix.MatrixLayout.word_lanes`.

    Args:
        c: ``[columns]`` float32, at most ``lanes * words``.
        lanes, words: uint64, codes of a word, a power of two, and words.
        table: ``[2 * lanes * wide]`` float32, scratch; ``wide`` is a power of two, either the
            number of words that are summed side by side, or at least ``words``.
    """
    n, size = N(c.size), N(table.size) // N(2)
    wide, source, target = size // lanes, N(0), size
    for i in range(lanes):
        row, first = i * wide, i * words
        there = min(words, n - first) if n > first else N(0)
        side = min(there, wide)
        for j in range(side):
            table[row + j] = c[first + j]
        for j in range(side, wide):
            table[row + j] = F(0.0)
        for chunk in range(wide, there, wide):
            for j in range(min(wide, there - chunk)):
                table[row + j] += c[first + chunk + j]
    # Rows are adjacent, and a power of two wide, so pairs are those of the flat table.
    while size > lanes:
        size //= N(2)
        for k in range(size):
            table[target + k] = table[source + N(2) * k] + table[source + N(2) * k + N(1)]
        source, target = target, source
    while size > N(1):
        size //= N(2)
        for i in range(size):
            table[source + i] += table[source + size + i]
    return table[source]


@register_jitable
def _read_columns(columns, first, v):
    """Unpack the columns' scales, which begin at ``columns[first]``, to ``v`` ``[n] float32``."""
    for j in range(N(v.size)):
        code = shift_right(columns[first + (j >> N(3))], U(N(4) * (j & N(7)))) & U(15)
        v[j] = float_of(U(code + U(COLUMN_BIAS)) << U(22))


@compiled
def _find_columns(g, e, rows, v, columns):
    """Find the columns' scales, and the base of the rows' scales.

    Args:
        g, e: ``[rows * columns]``, gradient and residual, as :func:`load` takes them.
        v: ``[columns]`` float32, written: the columns' scales.
        columns: ``[ceil(columns / 8)]`` uint32, written: their codes, 4 bits each.

    Returns:
        The base of the rows' scales, uint32.
    """
    n = N(v.size)
    lanes = np.zeros((COLUMN_LANES, v.size), np.float32)
    for i in range(N(rows)):
        start = i * n
        lane = lanes[i % N(COLUMN_LANES)]
        for j in range(n):
            lane[j] += _bounded(load(g, start + j) + load(e, start + j))
    width = N(COLUMN_LANES)
    while width > N(1):
        width //= N(2)
        for k in range(width):
            for j in range(n):
                lanes[k, j] = lanes[N(2) * k, j] + lanes[N(2) * k + N(1), j]
    top = U(0)
    for j in range(n):
        t = _rounded_upper(lanes[0, j], 10)
        top = t if t > top else top
    for j in range(N(columns.size)):
        columns[j] = U(0)
    for j in range(n):
        below = U(top - _rounded_upper(lanes[0, j], 10))
        code = U(15) - below if below < U(15) else U(0)
        columns[j >> N(3)] |= shift_left(U(code), U(N(4) * (j & N(7))))
    _read_columns(columns, N(0), v)
    exponent, left = N(top >> U(1)), N(rows)
    while left > N(1):
        left >>= N(1)
        exponent -= N(1) if exponent else N(0)
    if exponent < N(MIN_EXPONENT):
        return U(0)
    return U(U(8) * U(exponent) - U(CENTRE))


@register_jitable
def _byte_of(fit, base):
    """Byte, uint32, of a row with the scale ``fit``, a float32 that is finite and not negative."""
    t = _rounded_upper(fit, 12)
    if base == U(0) or t <= base:
        return U(NOTHING)
    byte = U(t - base)
    return byte if byte < U(254) else U(254)


@register_jitable
def _load_row(g, e, base, weights, x, u):
    """Load the row that begins at ``base``: ``x`` is gradient plus residual, and ``u`` its bounded
    magnitudes times the weights. Returns whether all of ``x`` is finite."""
    largest = U(0)
    for j in range(N(x.size)):
        y = load(g, base + j) + load(e, base + j)
        x[j] = y
        b = U(bits_of(y) & ABS)
        u[j] = _bounded(y) * weights[j]
        largest = b if b > largest else largest
    return largest < INF


@compiled
def _quantize_rows(g, e, rows, v, base, group, distance, kept, fresh, table, scales, codes):
    """Find the rows' scales and quantize all rows.

    Args:
        g, e: ``[rows * columns]``, as :func:`load` takes them; ``e`` is updated.
        v: ``[columns]`` float32, the columns' scales.
        base: uint32, from :func:`_find_columns`.
        distance: float32, factor on a row's fit.
        kept, fresh: float32, shares of the old and of the new residual.
        table: scratch of :func:`code_sum`.
        scales: ``[ceil(rows / 4)]`` uint32, written: the rows' bytes.
        codes: ``[rows * row_words]`` uint32, written.
    """
    n, lanes, width = N(v.size), N(len(group)), U(32 // len(group))
    words = (n + lanes - N(1)) // lanes
    x, u = np.empty(v.size, np.float32), np.empty(v.size, np.float32)
    c = np.zeros(words * lanes, np.uint32)
    half, mask = F(1 << (32 // len(group) - 1)), U(U(0xFFFFFFFF) >> U(32 - width))
    inverse, weights = _ONE / v, np.ones(v.size, np.float32)
    fitted = len(group) == 32
    for j in range(n):
        weights[j] = v[j] if fitted else _ONE
        u[j] = v[j] * weights[j]
    norm = code_sum(u, lanes, words, table)
    for j in range(N(scales.size)):
        scales[j] = U(0)
    for i in range(N(rows)):
        at, start = i * words, i * n
        byte = U(NOT_FINITE)
        if _load_row(g, e, start, weights, x, u):
            byte = _byte_of(code_sum(u, lanes, words, table) / norm * distance, base)
        scales[i >> N(2)] |= shift_left(byte, U(N(8) * (i & N(3))))
        if byte == U(NOTHING) or byte == U(NOT_FINITE):
            for j in range(words):
                codes[at + j] = U(0)
            if byte == U(NOT_FINITE):
                continue
        else:
            f = float_of(U(byte + base) << U(20))
            one = _ONE / f
            for j in range(n):
                q = np.floor(x[j] * one * inverse[j] * _HALF)
                q = half - _ONE if q > half - _ONE else q
                q = -half if q < -half else q
                x[j] = x[j] - (_TWO * q + _ONE) * (f * v[j])
                c[j] = U(U(np.int32(q)) & mask)
            for j in range(words):
                word = c[j]
                for k in range(N(1), lanes):
                    word |= shift_left(c[k * words + j], U(k) * width)
                codes[at + j] = word
        if e is None:
            continue
        if kept == F(0.0):
            for j in range(n):
                store_finite(e, start + j, x[j])
        else:
            for j in range(n):
                store_finite(e, start + j, kept * load(e, start + j) + fresh * x[j])


@compiled
def _dequantize_rows(messages, stride, ranks, rows, group, divisor, add, out):
    """Add up messages.

    Args:
        messages: ``[...]`` uint32, in which the messages begin ``stride`` words apart; each has its
            base, the columns' scales, the rows' bytes and the codes.
        out: ``[rows * columns]``, as :func:`store` takes it.
    """
    n, lanes, width = N(out.size // rows), N(len(group)), U(32 // len(group))
    words = (n + lanes - N(1)) // lanes
    scales = N(1) + (n + N(7)) // N(8)
    codes = scales + (N(rows) + N(3)) // N(4)
    v, sums = np.empty((ranks, n), np.float32), np.empty(n, np.float32)
    for r in range(N(ranks)):
        _read_columns(messages, r * N(stride) + N(1), v[r])
    for i in range(N(rows)):
        for j in range(n):
            sums[j] = F(0.0)
        for r in range(N(ranks)):
            first = r * N(stride)
            byte = shift_right(messages[first + scales + (i >> N(2))], U(N(8) * (i & N(3))))
            byte = U(byte & U(255))
            if byte == U(NOTHING):
                continue
            if byte == U(NOT_FINITE):
                for j in range(n):
                    sums[j] = F(np.nan)
                continue
            f = float_of(U(byte + messages[first]) << U(20))
            at, column = first + codes + i * words, v[r]
            for k in range(lanes):
                _add_codes(messages, at, words, k * words, U(k) * width, width, f, column, sums)
        write_average(sums, n, divisor, add, out, i * n)


@register_jitable
def _add_codes(messages, at, words, base, place, width, f, v, sums):
    """Add the elements from ``base`` on, whose codes of ``width`` bits are at bit ``place`` of a
    row's words."""
    n, above = N(v.size), U(32) - width
    for j in range(min(words, n - base) if n > base else N(0)):
        q = signed_code(shift_left(messages[at + j], U(above - place)), above)
        sums[base + j] += (_TWO * q + _ONE) * (f * v[base + j])
