"""Encode on a CPU: one dense pass over gradient and residual, one sparse pass over what is kept."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from tagc.ops.cpu.llvm import float_bits, popcount, trailing_zeros
from tagc.ops.cpu.scalar import U, compiled, load, positions, salts_of, section, store

_ABS, _INF = U(0x7FFFFFFF), U(0x7F800000)
_BATCH = 256


@compiled
def encode_row(
    g, e, n, lanes, threshold, step, seed, levels, capacity, hashes, partition, index, cells, counts
):
    words = index[: index.size - 1]
    bits, groups = float_bits(threshold), -(-n // lanes)
    above, nonzero, kept, poison = _select(
        g, e, n, lanes, bits, bits if capacity < groups else U(1), words
    )
    if kept > capacity:
        _trim(g, e, n, lanes, capacity, kept, words)
        kept = capacity
    salts = salts_of(seed, hashes)
    _emit(g, e, n, lanes, step, levels, words, salts, partition, cells)
    index[index.size - 1] = poison
    counts[0], counts[1], counts[2] = above, nonzero, kept


@compiled
def insert_shard(symbols, words, seed, hashes, partition, cells):
    _insert(symbols, words, salts_of(seed, hashes), partition, cells)


@compiled
def _select(g, e, n, lanes, threshold_bits, select_bits, words):
    """Accumulate into the residual and mark the selected groups.

    float32 residuals of kept groups are left holding x; others keep their old value there, since
    x would not fit, and :func:`_emit` accumulates those again.

    Returns: groups above the threshold, groups not zero, groups kept, poison.
    """
    block = 32 * lanes
    x = np.zeros(block, np.float32)
    bits = x.view(np.uint32)
    size = np.empty(32, np.uint32)
    above, nonzero, kept, poison = 0, 0, 0, 0
    for w in range(words.size):
        lo = w * block
        fill = min(block, n - lo)
        gw, ew = section(g, lo, lo + fill), section(e, lo, lo + fill)
        if fill == block:
            for j in range(block):
                x[j] = load(gw, j) + load(ew, j)
        else:
            for j in range(block):
                x[j] = np.float32(0.0)
            for j in range(fill):
                x[j] = load(gw, j) + load(ew, j)
        if lanes == 4:
            for i in range(32):
                a, b = bits[4 * i] & _ABS, bits[4 * i + 1] & _ABS
                c, d = bits[4 * i + 2] & _ABS, bits[4 * i + 3] & _ABS
                size[i] = max(max(a, b), max(c, d))
        elif lanes == 2:
            for i in range(32):
                size[i] = max(bits[2 * i] & _ABS, bits[2 * i + 1] & _ABS)
        else:
            for i in range(32):
                size[i] = bits[i] & _ABS
        word, largest, some, large = U(0), U(0), 0, 0
        for i in range(32):
            m = size[i]
            largest = max(largest, m)
            some += np.int64(m > U(0))
            large += np.int64(m >= threshold_bits)
            word |= U(m >= select_bits) << U(i)
        if largest < _INF and (word == U(0) or _keeps_x(e)):
            for j in range(fill):
                store(ew, j, x[j])
        else:
            word, bad = _settle(ew, x, size, fill, lanes, word)
            poison |= np.int64(bad > 0)
            some -= bad
            large -= bad
        words[w] = word
        above += large
        nonzero += some
        kept += popcount(word)
    return above, nonzero, kept, poison


@compiled
def _settle(ew, x, size, fill, lanes, word):
    """Write the residual of one word group by group: not where non-finite, not where kept."""
    bad = 0
    for i in range(32):
        if size[i] >= _INF:
            word &= ~(U(1) << U(i))
            bad += 1
        elif _keeps_x(ew) or not (word >> U(i)) & U(1):
            for j in range(i * lanes, min(fill, (i + 1) * lanes)):
                store(ew, j, x[j])
    return word, bad


def _keeps_x(e):
    raise NotImplementedError


@overload(_keeps_x, inline="always")
def _(e):
    """Whether the residual's storage can hold x itself until the sparse pass."""
    if isinstance(e, types.NoneType) or e.dtype == types.uint16:
        return lambda e: False
    return lambda e: True


@register_jitable(inline="always")
def _value(g, e, j):
    """x of a kept element in the sparse pass."""
    if _keeps_x(e):
        return load(e, j)
    return load(g, j) + load(e, j)


@compiled
def _trim(g, e, n, lanes, capacity, kept, words):
    """Clear all but the ``capacity`` largest of the selected groups, ties to the lower index."""
    size = np.empty(kept, np.uint32)
    t = 0
    for w in range(words.size):
        word = words[w]
        while word:
            lo = (w * 32 + trailing_zeros(word)) * lanes
            word &= U(word - U(1))
            m = U(0)
            for j in range(lo, min(n, lo + lanes)):
                m = max(m, float_bits(_value(g, e, j)) & _ABS)
            size[t] = m
            t += 1
    last = np.partition(size, kept - capacity)[kept - capacity] if capacity > 0 else _INF
    ties = capacity - np.sum(size > last)
    t = 0
    for w in range(words.size):
        word = words[w]
        while word:
            i = trailing_zeros(word)
            word &= U(word - U(1))
            m = size[t]
            t += 1
            if m == last and ties > 0:
                ties -= 1
            elif m <= last:
                words[w] &= ~(U(1) << U(i))
                lo = (w * 32 + i) * lanes
                for j in range(lo, min(n, lo + lanes)):
                    store(e, j, _value(g, e, j))


@compiled
def _emit(g, e, n, lanes, step, levels, words, salts, partition, cells):
    """Quantize what is kept, leave the rest in the residual, add the symbols to the cells."""
    cells[:] = 0
    inverse, limit = np.float32(1.0) / step, np.float32(levels)
    keys, symbols = np.empty(_BATCH, np.uint32), np.empty(_BATCH, cells.dtype)
    where = np.empty((max(1, salts.size), _BATCH), np.int64)
    count = 0
    for w in range(words.size):
        word = words[w]
        while word:
            key = w * 32 + trailing_zeros(word)
            word &= U(word - U(1))
            lo = key * lanes
            symbols[count] = _quantize(
                g, e, lo, min(n, lo + lanes), lanes, step, inverse, limit, cells
            )
            keys[count] = key
            count += 1
            if count == _BATCH:
                _scatter(keys, symbols, count, salts, partition, where, cells)
                count = 0
    _scatter(keys, symbols, count, salts, partition, where, cells)


def _quantize(g, e, lo, hi, lanes, step, inverse, limit, cells):
    raise NotImplementedError


@overload(_quantize)
def _(g, e, lo, hi, lanes, step, inverse, limit, cells):
    if cells.dtype == types.float32:

        def whole(g, e, lo, hi, lanes, step, inverse, limit, cells):
            x = _value(g, e, lo)
            store(e, lo, np.float32(0.0))
            return x

        return whole

    def quantized(g, e, lo, hi, lanes, step, inverse, limit, cells):
        bits = 32 // lanes
        symbol = np.int64(0)
        for j in range(lo, hi):
            x = _value(g, e, j)
            q = np.rint(min(max(x * inverse, -limit), limit))
            store(e, j, np.float32(x - np.float32(q * step)))
            symbol += np.int64(q) << (bits * (j - lo))
        return np.int32(symbol)

    return quantized


@compiled
def _scatter(keys, symbols, count, salts, partition, where, cells):
    if salts.size == 0:  # direct
        for t in range(count):
            cells[keys[t]] = symbols[t]
        return
    positions(keys, count, salts, partition, where)
    for i in range(salts.size):
        row = where[i]
        for t in range(count):
            cells[row[t]] += symbols[t]


@compiled
def _insert(symbols, words, salts, partition, cells):
    cells[:] = 0
    keys, batch = np.empty(_BATCH, np.uint32), np.empty(_BATCH, cells.dtype)
    where = np.empty((max(1, salts.size), _BATCH), np.int64)
    count = 0
    for w in range(words.size):
        word = words[w]
        while word:
            key = w * 32 + trailing_zeros(word)
            word &= U(word - U(1))
            keys[count], batch[count] = key, symbols[key]
            count += 1
            if count == _BATCH:
                _scatter(keys, batch, count, salts, partition, where, cells)
                count = 0
    _scatter(keys, batch, count, salts, partition, where, cells)
