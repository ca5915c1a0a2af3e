"""Which groups of a row are kept: one dense pass over gradient and residual."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from tagc.ops.cpu.llvm import float_bits, popcount, trailing_zeros
from tagc.ops.cpu.scalar import N, U, compiled, load, store_finite

_ABS, _INF = U(0x7FFFFFFF), U(0x7F800000)


@compiled
def select_groups(g, e, n, group, threshold_bits, select_bits, support, words):
    """Accumulate into the residual and mark the selected groups, or the finite ones of a support
    that is not empty.

    float32 residuals of kept groups are left holding x; others keep their old value there, since
    x would not fit, and the pass over what is kept accumulates those again.

    Returns: groups above the threshold, groups not zero, groups kept, poison.
    """
    lanes = len(group)
    block = 32 * lanes
    x, old = np.zeros(block, np.float32), _storage_like(e, block)
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
        elif lanes > 4:
            for i in range(32):
                m = U(0)
                for j in range(lanes):
                    m = max(m, U(bits[lanes * i + j] & _ABS))
                size[i] = m
        word, largest, some, large = U(0), U(0), U(0), U(0)
        for i in range(32):
            m = size[i] if lanes > 1 else bits[i] & _ABS
            largest = max(largest, m)
            some += U(m > U(0))
            large += U(m >= threshold_bits)
            word |= U(m >= select_bits) << U(i)
        if support.size > 0:
            word = support[w]
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
def value(g, e, j):
    """x of a kept element in the sparse pass."""
    if _keeps_x(e):
        return load(e, j)
    return load(g, j) + load(e, j)


@compiled
def keep_largest(g, e, n, lanes, capacity, kept, words):
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
                m = max(m, float_bits(value(g, e, j)) & _ABS)
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
                    store_finite(e, j, value(g, e, j))
