"""Selects the groups of a row in one dense pass over gradient and residual."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import float_bits, mask_at_least, popcount, trailing_zeros
from tagc.ops.cpu.kernels.scalar import N, U, compiled, load, store_finite

_ABS, _INF = U(0x7FFFFFFF), U(0x7F800000)
# Elements processed at a time.
_TILE = 1024
# Room in the stream past the last element: a whole block.
_SLACK = 4096


@compiled
def select_groups(g, e, n, group, threshold_bits, select_bits, support, room, words):
    """Accumulate into the residual, mark the selected groups and collect them.

    Groups that are not finite are not selected and keep their residual. With a support, all of its
    groups are collected; the finite ones are marked, and the x of the others is zeros.

    Args:
        g: ``[n]``, the gradient, float32 or the bits of bfloat16 as uint16.
        e: ``[n]``, the residual in the same dtypes, updated; or None.
        n: elements.
        group: a tuple of as many entries as a group has elements.
        threshold_bits: bits of the float32 threshold as uint32; only for the count.
        select_bits: bits of the least selected magnitude, float32 as uint32.
        support: ``[words]`` uint32, a bitmap, or ``[0]`` for none.
        room: the expected most groups.
        words: ``[words]`` uint32, written: the bitmap of the marked groups.

    Returns:
        The numbers of groups above the threshold, groups not zero and groups collected, all uint64;
        1 if a group is not finite, else 0; the keys of the collected groups, ``[collected]``
        uint32, ascending; their x, ``[collected * len(group)]`` float32. Both arrays are longer,
        with garbage at the end.
    """
    lanes = len(group)
    tile, width = N(_TILE), N(lanes)
    groups = tile // width
    # ``trailing_zeros`` of an empty mask points past the end.
    x, size = np.empty(_TILE + 32, np.float32), np.empty(_TILE, np.uint32)
    bits = x.view(np.uint32)
    keys = np.empty(room + _TILE + 32, np.uint32)
    stream = np.empty(room * lanes + _TILE + _SLACK, np.float32)
    above, nonzero, poison, t = N(0), N(0), 0, N(0)
    for tile_at in range((n + _TILE - 1) // _TILE):
        base = N(tile_at) * tile
        fill = min(tile, N(n) - base)
        if fill == tile:
            for j in range(tile):
                x[j] = load(g, base + j) + load(e, base + j)
        else:
            for j in range(fill):
                x[j] = load(g, base + j) + load(e, base + j)
            for j in range(fill, tile):
                x[j] = np.float32(0.0)
        _measure(bits, lanes, size)
        largest = U(0)
        for i in range(groups):
            largest = size[i] if size[i] > largest else largest
        bad = largest >= _INF
        if not bad:
            if fill == tile:
                for j in range(tile):
                    store_finite(e, base + j, x[j])
            else:
                for j in range(fill):
                    store_finite(e, base + j, x[j])
        else:
            poison = 1
            for j in range(fill):
                if size[j // width] < _INF:
                    store_finite(e, base + j, x[j])
                else:
                    x[j] = np.float32(0.0)
        if (t + groups + N(32)) > N(keys.size) or t * width + tile + N(_SLACK) > N(stream.size):
            keys = _longer(keys, 2 * keys.size)
            stream = _longer(stream, 2 * stream.size)
        first = base // width
        for w in range(first >> N(5), min(N(words.size), (first + groups) >> N(5))):
            at = (w << N(5)) - first
            some, large = mask_at_least(size, at, U(1)), mask_at_least(size, at, threshold_bits)
            word = support[w] if support.size > 0 else mask_at_least(size, at, select_bits)
            marked = word
            if bad:
                finite = U(~mask_at_least(size, at, _INF))
                some, large, marked = U(some & finite), U(large & finite), U(word & finite)
                if support.size == 0:
                    word = marked
            words[w] = marked
            nonzero += N(popcount(some))
            above += N(popcount(large))
            if word == U(0):
                continue
            end = t + N(popcount(word))
            while True:
                # Four at a time without a branch; the next groups overwrite the surplus.
                for _ in range(4 if lanes == 1 else 1):
                    i = at + N(trailing_zeros(word))
                    word &= U(word - U(1))
                    keys[t] = U(first + i)
                    for j in range(width):
                        stream[t * width + j] = x[i * width + j]
                    t += N(1)
                if t >= end:
                    break
            t = end
    return above, nonzero, t, poison, keys, stream


@compiled
def _longer(a, size):
    """A copy of ``a``, ``[n]`` of any dtype, with ``size`` entries, garbage from ``n`` on."""
    b = np.empty(size, a.dtype)
    # numba's assignment of slices would compile all of its error messages.
    for i in range(N(a.size)):
        b[i] = a[i]
    return b


@compiled
def _measure(bits, lanes, size):
    """Largest magnitude of each group of a tile.

    Args:
        bits: ``[_TILE]`` uint32, or longer: bits of the float32 elements.
        lanes: elements of a group, 1, 2 or 4.
        size: ``[_TILE]`` uint32, written: the bits of each group's largest magnitude, which sort
            like the magnitudes; garbage past the last group.
    """
    if lanes == 1:
        for i in range(N(_TILE)):
            size[i] = U(bits[i] & _ABS)
    elif lanes == 2:
        for i in range(N(_TILE // 2)):
            size[i] = max(U(bits[N(2) * i] & _ABS), U(bits[N(2) * i + N(1)] & _ABS))
    else:
        for i in range(N(_TILE // 4)):
            at = N(4) * i
            a, b = U(bits[at] & _ABS), U(bits[at + N(1)] & _ABS)
            c, d = U(bits[at + N(2)] & _ABS), U(bits[at + N(3)] & _ABS)
            size[i] = max(max(a, b), max(c, d))


@compiled
def _count_at_least(size, least):
    """Number of ``size``, ``[count]`` uint32, that are at least ``least``; uint64."""
    count = U(0)
    for t in range(N(size.size)):
        count += U(size[t] >= least)
    return N(count)


@compiled
def keep_largest(lanes, capacity, kept, keys, stream, words):
    """Leave the ``capacity`` largest of the collected groups, ties to the lower key.

    Args:
        lanes: elements of a group.
        capacity: number of groups that stay; fewer than ``kept``.
        kept: number of collected groups.
        keys: ``[kept]`` uint32, or longer, ascending; the groups that stay move to the front.
        stream: ``[kept * lanes]`` float32, or longer, their x; moved along with the keys.
        words: ``[words]`` uint32, the bitmap, in which the bits of the other groups are cleared.
    """
    width = N(lanes)
    size = np.empty(kept, np.uint32)
    for t in range(N(kept)):
        m = U(0)
        for j in range(t * width, (t + N(1)) * width):
            m = max(m, U(float_bits(stream[j]) & _ABS))
        size[t] = m
    # Find the largest number that at least ``capacity`` sizes reach, bit by bit.
    last = U(0) if capacity > 0 else _INF
    for b in range(31 if capacity > 0 else 0):
        trial = U(last | U(U(0x40000000) >> U(b)))
        if _count_at_least(size, trial) >= N(capacity):
            last = trial
    ties = capacity - np.int64(_count_at_least(size, U(last + U(1))))
    left = N(0)
    for t in range(N(kept)):
        m, key = size[t], keys[t]
        if m > last or (m == last and ties > 0):
            ties -= np.int64(m == last)
            keys[left] = key
            for j in range(width):
                stream[left * width + j] = stream[t * width + j]
            left += N(1)
        else:
            words[N(key) >> N(5)] ^= U(N(1) << (N(key) & N(31)))
