"""Selects the groups of a row, and quantizes them."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.arrays import ABS, INF, F, N, U, bits_of, compiled, load, store_finite


@compiled
def keys_of(words):
    """The groups of a bitmap ``[words]`` uint32: ``[count]`` uint32, ascending."""
    keys = np.empty(32 * words.size, np.uint32)
    count = N(0)
    for w in range(N(words.size)):
        word = words[w]
        if word == U(0):
            continue
        for bit in range(N(32)):
            keys[count] = w * N(32) + bit  # overwritten by the next one if it is not set
            count += N(word >> U(bit)) & N(1)
    return keys[:count].copy()


@compiled
def measure(g, e, n, group, sizes):
    """Largest magnitudes of the groups of gradient plus residual.

    Args:
        g, e: ``[n]``, as :func:`load` takes them.
        sizes: ``[groups]`` uint32, written: the bits of each group's largest magnitude, which sort
            like the magnitudes; from ``INF`` on, the group is not finite.
    """
    lanes = N(len(group))
    whole = N(n) // lanes
    for i in range(whole):
        largest = U(0)
        for lane in range(lanes):
            m = _magnitude(g, e, i * lanes + lane)
            largest = m if m > largest else largest
        sizes[i] = largest
    if whole < N(sizes.size):
        sizes[whole] = U(0)
        for j in range(whole * lanes, N(n)):
            sizes[whole] = max(sizes[whole], _magnitude(g, e, j))


@register_jitable(inline="always")
def _magnitude(g, e, j):
    return U(bits_of(load(g, j) + load(e, j)) & ABS)


@register_jitable(inline="always")
def is_set(words, i):
    """Whether bit ``i`` of a bitmap ``[words]`` uint32 is set."""
    return (words[i >> N(5)] >> U(i & N(31))) & U(1) != U(0)


@compiled
def choose(sizes, threshold, capacity, support, words):
    """Mark the groups to keep.

    Args:
        sizes: ``[groups]`` uint32, from :func:`measure`.
        threshold: bits of the float32 threshold, uint32.
        capacity: the most groups to keep; for all groups, every one that is not zero is kept.
        support: ``[words]`` uint32, a bitmap of the groups to keep instead; ``[0]`` for none.
        words: ``[words]`` uint32, written: the bitmap of the kept groups, all of them finite.

    Returns:
        The numbers of groups above the threshold, of groups that are not zero and of kept groups;
        and whether a group is not finite.
    """
    above, nonzero, kept, finite = 0, 0, 0, True
    for i in range(N(sizes.size)):
        size = sizes[i]
        finite &= size < INF
        nonzero += U(0) < size < INF
        above += threshold <= size < INF
    least, ties = U(1), np.int64(sizes.size)
    if capacity < sizes.size:
        least = threshold
        if above > capacity:
            least, ties = _limit(sizes, capacity)
    words[:] = U(0)
    for i in range(N(sizes.size)):
        size = sizes[i]
        if size >= INF:
            continue
        if support.size > 0:
            keep = is_set(support, i)
        else:
            keep = size > least or (size == least and ties > 0)
            ties -= np.int64(size == least)
        if keep:
            words[i >> N(5)] |= U(U(1) << U(i & N(31)))
            kept += 1
    return above, nonzero, kept, not finite


@compiled
def _limit(sizes, capacity):
    """The ``capacity``-th largest of the finite sizes, and how many of its size may be kept: those
    with the lowest keys. Nothing is as large as the limit of a capacity of 0."""
    if capacity == 0:
        return INF, np.int64(0)
    limit = U(0)
    for b in range(31):  # the largest number that at least `capacity` sizes reach, bit by bit
        trial = U(limit | U(U(0x40000000) >> U(b)))
        if _count_at_least(sizes, trial) >= capacity:
            limit = trial
    return limit, capacity - _count_at_least(sizes, U(limit + U(1)))


@register_jitable
def _count_at_least(sizes, least):
    count = U(0)
    for i in range(N(sizes.size)):
        count += U(least <= sizes[i] < INF)
    return np.int64(count)


@compiled
def quantize_groups(g, e, n, group, sizes, words, step, levels, keys, symbols):
    """Quantize the kept groups, and leave the rest in the residual.

    Args:
        g, e: ``[n]``, as :func:`load` takes them; ``e`` is updated, except for groups that are not
            finite.
        sizes: ``[groups]`` uint32, from :func:`measure`.
        words: ``[words]`` uint32, the bitmap of the kept groups.
        step: float32, a power of two.
        levels: largest magnitude of a lane.
        keys, symbols: ``[kept]`` uint32 and int32, written.

    Returns:
        The number of groups with a clipped element.
    """
    lanes = N(len(group))
    inverse, limit = F(1.0) / step, F(levels)
    count, saturated = N(0), 0
    for i in range(N(sizes.size)):
        if sizes[i] >= INF:
            continue
        first = i * lanes
        end = min(first + lanes, N(n))
        if not is_set(words, i):
            if e is not None:
                for j in range(first, end):
                    store_finite(e, j, load(g, j) + load(e, j))
            continue
        symbol, clipped = np.int64(0), False
        for j in range(first, end):
            x = load(g, j) + load(e, j)
            scaled = x * inverse
            clipped |= abs(scaled) > limit
            q = np.rint(min(max(scaled, -limit), limit))
            store_finite(e, j, F(x - F(q * step)))
            symbol += np.int64(q) << np.int64(N(32 // len(group)) * (j - first))
        keys[count], symbols[count] = i, np.int32(symbol)
        count += N(1)
        saturated += clipped
    return saturated
