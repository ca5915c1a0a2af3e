"""Kernels of quantized matrices: quantize rows one by one, and add up several rows at a time.

They read gradient and residual twice, because a row's codes need the scales of all columns.

LLVM inlines the helpers; numba's own inlining warns of assignments in loops and branches.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.kernels.llvm import (
    add_pairs,
    bits_float,
    float_bits,
    shift_left,
    shift_right,
    shift_right_signed,
)
from tagc.ops.cpu.kernels.output import TILE, new_tile, write_tile
from tagc.ops.cpu.kernels.scalar import N, U, compiled, load, store_finite
from tagc.ops.matrix import (
    CENTRE,
    COLUMN_BIAS,
    COLUMN_LANES,
    MIN_EXPONENT,
    NOT_FINITE,
    NOTHING,
    SPAN,
)

_ABS, _INF = U(0x7FFFFFFF), U(0x7F800000)
_LARGEST = U((127 + 64) << 23)
_ONE, _TWO, _HALF = np.float32(1.0), np.float32(2.0), np.float32(0.5)


@register_jitable
def _bounded(x):
    """Magnitude of float32 ``x``, 0 if it is not finite, and at most ``LARGEST``."""
    b = U(float_bits(x) & _ABS)
    return bits_float(b if b < _LARGEST else (_LARGEST if b < _INF else U(0)))


@register_jitable
def _pairs(total, lanes):
    """Add up ``total[:lanes]``, float32, neighbours first; the entries are scratch afterwards."""
    width = lanes
    while width > 1:
        width //= 2
        for k in range(width):
            total[k] = total[2 * k] + total[2 * k + 1]
    return total[0]


@register_jitable
def code_sum(c, lanes, words, table):
    """Sum of one number for every code of a row, in the order of
    :attr:`tagc.ops.matrix.MatrixLayout.word_lanes`.

    Args:
        c: ``[codes]`` float32, contiguous, at most ``lanes * words``.
        lanes, words: uint64, codes of a word, a power of two, and words.
        table: ``[2 * lanes * wide + 16]`` float32, scratch; ``wide`` is a power of two, either the
            number of words that are summed side by side, or at least ``words``.
    """
    n = N(c.size)
    size = (N(table.size) - N(16)) // N(2)
    wide, source, target = size // lanes, N(0), size
    if n == size and wide > N(1) and n & N(15) == N(0):
        # If there are as many codes as places, the table would be a copy of them.
        for k in range(N(0), size // N(2), N(8)):
            add_pairs(c, N(2) * k, table, target + k)
        source, target, size = target, source, size // N(2)
    else:
        for i in range(lanes):
            row, first = i * wide, i * words
            there = min(words, n - first) if n > first else N(0)
            side = min(there, wide)
            for j in range(side):
                table[row + j] = c[first + j]
            for j in range(side, wide):
                table[row + j] = np.float32(0.0)
            for chunk in range(wide, there, wide):
                for j in range(min(wide, there - chunk)):
                    table[row + j] += c[first + chunk + j]
    # Rows are adjacent, and a power of two wide, so pairs are those of the flat table.
    while size > lanes:
        size //= N(2)
        # Up to 7 places past `size` are also written: scratch, or places that were read already.
        for k in range(N(0), size, N(8)):
            add_pairs(table, source + N(2) * k, table, target + k)
        source, target = target, source
    half = lanes
    while half > N(1):
        half //= N(2)
        for i in range(half):
            table[source + i] += table[source + half + i]
    return table[source]


@register_jitable
def _load_row(g, e, base, weights, x, u):
    """Load one row.

    Args:
        g: ``[...]``, the gradient, float32 or the bits of bfloat16 as uint16.
        e: ``[...]``, the residual in the same dtypes; or None.
        base: start of the row in both.
        weights: ``[columns]`` float32.
        x: ``[columns]`` float32, written: the sum of gradient and residual.
        u: ``[columns]`` float32, written: bounded magnitudes of ``x``, times the weights.

    Returns:
        Whether all of ``x`` is finite.
    """
    largest = U(0)
    for j in range(N(x.size)):
        y = load(g, base + j) + load(e, base + j)
        x[j] = y
        b = U(float_bits(y) & _ABS)
        u[j] = _bounded(y) * weights[j]
        largest = b if b > largest else largest
    return largest < _INF


@compiled
def read_scales(columns, v):
    """Unpack the columns' scales: ``columns`` ``[ceil(n / 8)]`` uint32 to ``v`` ``[n]`` float32."""
    for j in range(N(v.size)):
        code = shift_right(columns[j >> N(3)], U(N(4) * (j & N(7)))) & U(15)
        v[j] = bits_float(shift_left(U(code + U(COLUMN_BIAS)), U(22)))


@compiled
def quantize_columns(g, e, rows, v, columns):
    """Find the columns' scales, and the base of the rows' scales.

    Args:
        g: ``[rows * columns]``, the gradient, float32 or the bits of bfloat16 as uint16.
        e: ``[rows * columns]``, the residual in the same dtypes; or None.
        rows: number of rows.
        v: ``[columns]`` float32, written: the columns' scales.
        columns: ``[ceil(columns / 8)]`` uint32, written: their codes, 4 bits each.

    Returns:
        The base of the rows' scales, uint32.
    """
    n = N(v.size)
    u = np.empty(v.size, np.float32)
    lanes = np.zeros((COLUMN_LANES, v.size), np.float32)
    total = np.empty(COLUMN_LANES, np.float32)
    for i in range(N(rows)):
        start = i * n
        row = lanes[i % N(COLUMN_LANES)]
        for j in range(n):
            row[j] += _bounded(load(g, start + j) + load(e, start + j))
    for j in range(n):
        for k in range(COLUMN_LANES):
            total[k] = lanes[k, j]
        u[j] = _pairs(total, COLUMN_LANES)
    top = U(0)
    for j in range(n):
        t = shift_right(U(float_bits(u[j]) + U(1 << 21)), U(22))
        top = t if t > top else top
    for j in range(N(columns.size)):
        columns[j] = U(0)
    for j in range(n):
        below = U(top - shift_right(U(float_bits(u[j]) + U(1 << 21)), U(22)))
        code = U(15) - below if below < U(15) else U(0)
        columns[j >> N(3)] |= shift_left(U(code), U(N(4) * (j & N(7))))
    read_scales(columns, v)
    exponent, left = N(shift_right(top, U(1))), N(rows)
    while left > N(1):
        left >>= N(1)
        exponent -= N(1) if exponent else N(0)
    if exponent < N(MIN_EXPONENT):
        return U(0)
    return U(U(8) * U(exponent) - U(CENTRE))


@register_jitable
def _byte_of(fit, base):
    """Byte, uint32, of a row with the scale ``fit``, a float32 that is finite and not negative."""
    t = shift_right(U(float_bits(fit) + U(1 << 19)), U(20))
    if base == U(0) or t <= base:
        return U(NOTHING)
    byte = U(t - base)
    return byte if byte < U(254) else U(254)


@compiled
def quantize_rows(g, e, rows, v, base, size, group, distance, kept, fresh, scales, codes):
    """Find the rows' scales and quantize all rows.

    Args:
        g: ``[rows * columns]``, the gradient, float32 or the bits of bfloat16 as uint16.
        e: ``[rows * columns]``, the residual in the same dtypes, updated; or None.
        rows: number of rows.
        v: ``[columns]`` float32, the columns' scales.
        base: uint32, from :func:`quantize_columns`.
        size: uint64, neighbours that share a code; 1 for none.
        group: a tuple of as many entries as a word has codes.
        distance: float32, factor on a row's fit.
        kept, fresh: float32, shares of the old and of the new residual.
        scales: ``[ceil(rows / 4)]`` uint32, written: the rows' bytes.
        codes: ``[rows * row_words]`` uint32, written.
    """
    n, lanes, width = N(v.size), N(len(group)), U(32 // len(group))
    grouped = size > N(1)
    count = (n + size - N(1)) // size
    words = (count + lanes - N(1)) // lanes
    x, u = np.empty(v.size, np.float32), np.empty(v.size, np.float32)
    inverse, squares = np.empty(v.size, np.float32), np.empty(count, np.float32)
    place, wide = np.empty(count, np.uint64), N(1)
    while wide < words and wide * lanes * size < N(SPAN):
        wide *= N(2)
    table = np.empty(N(2) * lanes * wide + N(16), np.float32)
    c = np.zeros(words * lanes, np.uint32)
    half, mask = np.float32(1 << (32 // len(group) - 1)), U(U(0xFFFFFFFF) >> U(32 - width))
    fitted = grouped or len(group) == 32
    weights = np.ones(v.size, np.float32)
    for j in range(n):
        inverse[j] = _ONE / v[j]
        if fitted and not grouped:
            weights[j] = v[j]
        if not grouped:
            squares[j] = v[j] * v[j] if fitted else v[j]
    norm = code_sum(squares, lanes, words, table) if not grouped else _ONE
    for j in range(N(scales.size)):
        scales[j] = U(0)
    for i in range(N(rows)):
        at, start = i * words, i * n
        byte = U(NOT_FINITE)
        if _load_row(g, e, start, weights, x, u):
            if grouped:
                _find_largest(x, u, v, inverse, size, place, squares)
                norm = code_sum(squares, lanes, words, table)
            byte = _byte_of(code_sum(u[:count], lanes, words, table) / norm * distance, base)
        scales[i >> N(2)] |= shift_left(byte, U(N(8) * (i & N(3))))
        if byte == U(NOTHING) or byte == U(NOT_FINITE):
            for j in range(words):
                codes[at + j] = U(0)
            if byte == U(NOT_FINITE):
                continue
        else:
            f = bits_float(shift_left(U(byte + base), U(20)))
            if grouped:
                for t in range(count):
                    j = t * size + place[t]
                    negative = float_bits(x[j]) > _ABS
                    step = f * v[j]
                    x[j] = x[j] + step if negative else x[j] - step
                    c[t] = U(place[t]) + (U(size) if negative else U(0))
            else:
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
                    word |= shift_left(c[k * words + j], U(U(k) * width))
                codes[at + j] = word
        if e is None:
            continue
        if kept == np.float32(0.0):
            for j in range(n):
                store_finite(e, start + j, x[j])
        else:
            for j in range(n):
                store_finite(e, start + j, kept * load(e, start + j) + fresh * x[j])


@register_jitable
def _find_largest(x, u, v, inverse, size, place, squares):
    """Find the first largest ``|x * inverse|`` of every ``size`` neighbours of a row.

    Args:
        x: ``[columns]`` float32.
        u: ``[columns]`` float32, bounded magnitudes of ``x``; the first ``codes`` entries become
            ``u * v`` of the elements found.
        v, inverse: ``[columns]`` float32, the columns' scales and one over them.
        size: uint64, neighbours that share a code.
        place: ``[codes]`` uint64, written: places of the elements found, from 0 to ``size - 1``.
        squares: ``[codes]`` float32, written: ``v * v`` of the elements found.
    """
    n = N(x.size)
    for t in range(N(place.size)):
        first = t * size
        best, largest = first, U(0)
        for j in range(first, min(n, first + size)):
            b = U(float_bits(x[j] * inverse[j]) & _ABS)
            if b > largest:
                best, largest = j, b
        place[t] = best - first
        squares[t] = v[best] * v[best]
        u[t] = u[best] * v[best]


@register_jitable
def _add_row(source, at, words, group, f, v, sums, first):
    """Add the elements of a row in which each element has its own code.

    Args:
        source: ``[...]`` uint32.
        at: start of the row's codes in ``source``.
        words: words of a row's codes.
        group: a tuple of as many entries as a word has codes.
        f: float32, the row's scale.
        v: ``[columns]`` float32, the columns' scales.
        sums: ``[...]`` float32, in which the row begins at ``first``.
    """
    n, width = N(v.size), U(32 // len(group))
    above = U(32) - width
    for k in range(N(len(group))):
        up, base = above - width * U(k), k * words
        there = min(words, n - base) if n > base else N(0)
        if len(group) == 32:
            # The code -1 stands for -1, and 0 for 1.
            for j in range(there):
                negative = shift_left(source[at + j], up) & ~_ABS
                sums[first + base + j] += bits_float(U(float_bits(f * v[base + j]) ^ negative))
        else:
            for j in range(there):
                q = shift_right_signed(shift_left(source[at + j], up), above)
                sums[first + base + j] += (_TWO * q + _ONE) * (f * v[base + j])


@register_jitable
def _add_groups(source, at, words, group, size, f, v, sums, first):
    """Add the elements of a row in which ``size`` neighbours share a code.

    Args:
        source, at, words, group, f: as in :func:`_add_row`.
        size: uint64, neighbours that share a code.
        v, sums, first: as in :func:`_add_row`.
    """
    width = U(32 // len(group))
    for k in range(N(len(group))):
        for j in range(words):
            code = shift_right(source[at + j], U(k) * width)
            place = (k * words + j) * size + N(code & U(size - N(1)))
            if place < N(v.size):  # always true if quantize_rows wrote the message
                step = f * v[place]
                sums[first + place] += -step if code & U(size) else step


@compiled
def dequantize_rows(
    messages, stride, ranks, scales, codes, rows, size, group, divisor, add, out
):  # fmt: skip
    """Add up messages, see :meth:`tagc.ops.matrix.MatrixOps.dequantize_matrix`.

    Args:
        messages: ``[...]`` uint32, in which the messages begin ``stride`` words apart; each begins
            with the base and the columns' scales.
        stride: words from one message to the next.
        ranks: number of messages.
        scales, codes: start of the rows' bytes and of the codes in a message, in words.
        rows: number of rows.
        size: uint64, neighbours that share a code; 1 for none.
        group: a tuple of as many entries as a word has codes.
        divisor: float32.
        add: whether to add what ``out`` holds.
        out: ``[rows * columns]`` float32 or the bits of bfloat16 as uint16, written.
    """
    n, lanes = N(out.size // rows), N(len(group))
    words = ((n + size - N(1)) // size + lanes - N(1)) // lanes
    v = np.empty((ranks, n), np.float32)
    for r in range(N(ranks)):
        first = r * N(stride)
        read_scales(messages[first + N(1) : first + N(scales)], v[r])
    # Rows of a tile. Its elements are a multiple of 16 if enough rows fit, see `new_tile`.
    many, even = max(N(1), N(TILE) // n), N(1)
    while even * n & N(15):
        even += even
    if many > even:
        many &= ~(even - N(1))
    sums = new_tile(many * n, out)
    for start in range(N(0), N(rows), many):
        count = min(many, N(rows) - start)
        for t in range(count):
            i, place = start + t, t * n
            for r in range(N(ranks)):
                first = r * N(stride)
                word = messages[first + N(scales) + (i >> N(2))]
                byte = shift_right(word, U(N(8) * (i & N(3)))) & U(255)
                if byte == U(NOTHING):
                    continue
                if byte == U(NOT_FINITE):
                    for j in range(n):
                        sums[place + j] = np.float32(np.nan)
                    continue
                f = bits_float(shift_left(U(byte + messages[first]), U(20)))
                at = first + N(codes) + i * words
                if size == N(1):
                    _add_row(messages, at, words, group, f, v[r], sums, place)
                else:
                    _add_groups(messages, at, words, group, size, f, v[r], sums, place)
        write_tile(sums, count * n, divisor, add, out, start * n)
