"""The sparse pass of encoding: adds the symbols of the kept groups to their cells."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.kernels.llvm import trailing_zeros
from tagc.ops.cpu.kernels.scalar import N, U, compiled, positions, salts_of, store_finite

_BATCH = 256


@compiled
def keep_marked(lanes, kept, keys, stream, words):
    """Drop the collected groups that are not marked: groups of a support that are not finite.

    Args:
        lanes: elements of a group.
        kept: number of collected groups.
        keys: ``[kept]`` uint32, or longer, ascending; the groups that stay move to the front.
        stream: ``[kept * lanes]`` float32, or longer, their x; moved along with the keys.
        words: ``[words]`` uint32, the bitmap of the marked groups.

    Returns:
        The number of groups that stay, uint64.
    """
    width, left = N(lanes), N(0)
    for t in range(N(kept)):
        key = keys[t]
        if (words[N(key) >> N(5)] >> U(N(key) & N(31))) & U(1):
            keys[left] = key
            for j in range(width):
                stream[left * width + j] = stream[t * width + j]
            left += N(1)
    return left


@compiled
def insert_shard(symbols, words, seed, hashes, partition, cells):
    """Sketch given symbols, see :meth:`tagc.ops.sketch.SketchOps.insert`.

    Args:
        symbols: ``[groups]`` int32.
        words: ``[words]`` uint32, the bitmap of the groups to insert.
        seed: int32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        cells: ``[cells]`` int32, written.
    """
    _insert(symbols, words, salts_of(seed, hashes), partition, cells)


@compiled
def write_cells(
    e, n, group, step, seed, levels, keys, stream, hashes, partition, cells,
):  # fmt: skip
    """Quantize the kept groups, leave the rest in the residual, and add the symbols to the cells.

    Args:
        e: ``[n]``, the residual, float32 or the bits of bfloat16 as uint16, updated; or None.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step: float32, a power of two.
        seed: int32.
        levels: largest magnitude of a lane.
        keys: ``[kept]`` uint32, ascending.
        stream: ``[kept * len(group)]`` float32, or longer, x of the groups ``keys``.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        cells: ``[cells]`` int32, written.

    Returns:
        The number of groups with a clipped element, int64.
    """
    cells[:] = 0
    lanes, salts = len(group), salts_of(seed, hashes)
    inverse, limit = np.float32(1.0) / step, np.float32(levels)
    symbols = np.empty(_BATCH, np.int32)
    where = np.empty((max(1, salts.size), _BATCH), np.uint64)
    saturated = 0
    for lo in range(0, keys.size, _BATCH):
        batch = keys[lo : lo + _BATCH]
        for t in range(N(batch.size)):
            at = N(batch[t]) * N(lanes)
            symbols[t], clipped = _quantize(
                stream, (N(lo) + t) * N(lanes), e, at, min(N(lanes), N(n) - at), group, step,
                inverse, limit,
            )  # fmt: skip
            saturated += np.int64(clipped)
        _scatter(batch, symbols, batch.size, salts, partition, where, cells)
    return saturated


@register_jitable(inline="always")
def _quantize(x, first, e, at, size, group, step, inverse, limit):
    """Symbol of one group, int32; the residual keeps the quantization error.

    Args:
        x: ``[...]`` float32, in which the group begins at ``first``.
        first: start of the group in ``x``.
        e: ``[n]``, the residual, float32 or the bits of bfloat16 as uint16, updated; or None.
        at: start of the group in ``e``.
        size: number of existing elements of the group, at most ``len(group)``.
        group: a tuple of as many entries as a symbol has lanes.
        step, inverse: float32, the step and one over it.
        limit: float32, largest magnitude of a lane.

    Returns:
        The symbol, and whether an element was clipped.
    """
    symbol, clipped = np.int64(0), False
    for j in range(N(len(group))):
        if j < size:
            scaled = x[first + j] * inverse
            clipped |= abs(scaled) > limit
            q = np.rint(min(max(scaled, -limit), limit))
            store_finite(e, at + j, np.float32(x[first + j] - np.float32(q * step)))
            symbol += np.int64(q) << np.int64(N(32 // len(group)) * j)
    return np.int32(symbol), clipped


@compiled
def _scatter(keys, symbols, count, salts, partition, where, cells):
    """Add symbols to the cells of their keys.

    Args:
        keys: ``[count]`` uint32, or longer, all different.
        symbols: ``[count]`` int32, or longer.
        count: number of keys.
        salts: ``[hashes]`` uint32; ``[0]`` for a direct layout.
        partition: cells of a partition.
        where: ``[hashes, count]`` uint64, or wider: scratch.
        cells: ``[cells]`` int32, added to.
    """
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
    """Clear the cells, then add the symbols of the groups in a bitmap, a batch at a time.

    Args:
        symbols: ``[groups]`` int32.
        words: ``[words]`` uint32, the bitmap of the groups to insert.
        salts: ``[hashes]`` uint32; ``[0]`` for a direct layout.
        partition: cells of a partition.
        cells: ``[cells]`` int32, written.
    """
    cells[:] = 0
    keys, batch = np.empty(_BATCH, np.uint32), np.empty(_BATCH, np.int32)
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
