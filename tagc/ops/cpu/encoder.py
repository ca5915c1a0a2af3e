"""Encode on a CPU: one dense pass over gradient and residual, one sparse pass over what is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from tagc.ops.cpu.llvm import float_bits, popcount, trailing_zeros
from tagc.ops.cpu.scalar import N, U, compiled, load, positions, salts_of, store_finite

_ABS, _INF = U(0x7FFFFFFF), U(0x7F800000)
_BATCH = 256


@compiled
def encode_row(
    g, e, n, group, threshold, step, seed, levels, capacity, hashes, partition, index, cells, counts
):
    words = index[: index.size - 1]
    bits, groups = float_bits(threshold), -(-n // len(group))
    above, nonzero, kept, poison = _select(
        g, e, n, group, bits, bits if capacity < groups else U(1), words
    )
    if kept > capacity:
        _trim(g, e, n, len(group), capacity, kept, words)
        kept = capacity
    salts = salts_of(seed, hashes)
    saturated = _emit(g, e, n, group, step, levels, words, salts, partition, cells)
    index[index.size - 1] = poison
    counts[0], counts[1], counts[2], counts[3] = above, nonzero, kept, saturated


@compiled
def insert_shard(symbols, words, seed, hashes, partition, cells):
    _insert(symbols, words, salts_of(seed, hashes), partition, cells)


@compiled
def _select(g, e, n, group, threshold_bits, select_bits, words):
    """Accumulate into the residual and mark the selected groups.

    float32 residuals of kept groups are left holding x; others keep their old value there, since
    x would not fit, and :func:`_emit` accumulates those again.

    Returns: groups above the threshold, groups not zero, groups kept, poison.
    """
    lanes = len(group)
    block = 32 * lanes
    x, old = np.zeros(128, np.float32), _storage_like(e, 128)
    bits, size = x.view(np.uint32), np.empty(32, np.uint32)
    above, nonzero, kept, poison = 0, 0, 0, 0
    for w in range(words.size):
        base, fill = N(w * block), N(min(block, n - w * block))
        if fill == N(block):
            for j in range(N(block)):
                x[j] = load(g, base + j) + load(e, base + j)
        else:
            x[:] = np.float32(0.0)
            for j in range(fill):
                x[j] = load(g, base + j) + load(e, base + j)
        if lanes == 4:
            for i in range(32):
                a, b = bits[4 * i] & _ABS, bits[4 * i + 1] & _ABS
                c, d = bits[4 * i + 2] & _ABS, bits[4 * i + 3] & _ABS
                size[i] = max(max(a, b), max(c, d))
        elif lanes == 2:
            for i in range(32):
                size[i] = max(bits[2 * i] & _ABS, bits[2 * i + 1] & _ABS)
        word, largest, some, large = U(0), U(0), U(0), U(0)
        for i in range(32):
            m = size[i] if lanes > 1 else bits[i] & _ABS
            largest = max(largest, m)
            some += U(m > U(0))
            large += U(m >= threshold_bits)
            word |= U(m >= select_bits) << U(i)
        bad = U(0)
        if largest >= _INF:
            for i in range(32):
                bad |= U((size[i] if lanes > 1 else bits[i] & _ABS) >= _INF) << U(i)
            poison = 1
            word &= ~bad
            some -= U(popcount(bad))
            large -= U(popcount(bad))
        if e is not None:
            spared = bad if _keeps_x(e) else bad | word
            if fill == N(block) and spared == U(0):
                for j in range(N(block)):
                    store_finite(e, base + j, x[j])
            else:
                for j in range(fill):
                    old[j] = e[base + j]
                for j in range(fill):
                    store_finite(e, base + j, x[j])
                while spared:
                    first = N(trailing_zeros(spared) * lanes)
                    spared &= U(spared - U(1))
                    for j in range(first, min(fill, first + N(lanes))):
                        e[base + j] = old[j]
        words[w] = word
        above += large
        nonzero += some
        kept += popcount(word)
    return above, nonzero, kept, poison


def _storage_like(e, size):
    raise NotImplementedError


@overload(_storage_like)
def _(e, size):
    if isinstance(e, types.NoneType):
        return lambda e, size: np.empty(0, np.float32)
    return lambda e, size: np.empty(size, e.dtype)


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
                    store_finite(e, j, _value(g, e, j))


@compiled
def _emit(g, e, n, group, step, levels, words, salts, partition, cells):
    """Quantize what is kept, leave the rest in the residual, add the symbols to the cells.

    Returns: groups with an element that was clipped.
    """
    cells[:] = 0
    lanes = len(group)
    inverse, limit = np.float32(1.0) / step, np.float32(levels)
    keys, symbols = np.empty(_BATCH, np.uint32), np.empty(_BATCH, cells.dtype)
    where = np.empty((max(1, salts.size), _BATCH), np.uint64)
    count, saturated = 0, 0
    for w in range(words.size):
        word = words[w]
        while word:
            key = w * 32 + trailing_zeros(word)
            word &= U(word - U(1))
            size = N(min(lanes, n - key * lanes))
            symbols[count], clipped = _quantize(
                g, e, N(key * lanes), size, group, step, inverse, limit, cells
            )
            saturated += np.int64(clipped)
            keys[count] = key
            count += 1
            if count == _BATCH:
                _scatter(keys, symbols, count, salts, partition, where, cells)
                count = 0
    _scatter(keys, symbols, count, salts, partition, where, cells)
    return saturated


def _quantize(g, e, at, size, group, step, inverse, limit, cells) -> Any:
    raise NotImplementedError


@overload(_quantize, inline="always")
def _(g, e, at, size, group, step, inverse, limit, cells):
    if cells.dtype == types.float32:

        def whole(g, e, at, size, group, step, inverse, limit, cells):
            x = _value(g, e, at)
            store_finite(e, at, np.float32(0.0))
            return x, False

        return whole

    def quantized(g, e, at, size, group, step, inverse, limit, cells):
        symbol, clipped = np.int64(0), False
        for j in range(N(len(group))):
            if j < size:
                x = _value(g, e, at + j)
                scaled = x * inverse
                clipped |= abs(scaled) > limit
                q = np.rint(min(max(scaled, -limit), limit))
                store_finite(e, at + j, np.float32(x - np.float32(q * step)))
                symbol += np.int64(q) << np.int64(N(32 // len(group)) * j)
        return np.int32(symbol), clipped

    return quantized


@compiled
def _scatter(keys, symbols, count, salts, partition, where, cells):
    if salts.size == 0:  # direct
        for t in range(N(count)):
            cells[keys[t]] = symbols[t]
        return
    positions(keys, count, salts, partition, where)
    for i in range(salts.size):
        row = where[i]
        for t in range(N(count)):
            cells[row[t]] += symbols[t]


@compiled
def _insert(symbols, words, salts, partition, cells):
    cells[:] = 0
    keys, batch = np.empty(_BATCH, np.uint32), np.empty(_BATCH, cells.dtype)
    where = np.empty((max(1, salts.size), _BATCH), np.uint64)
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
