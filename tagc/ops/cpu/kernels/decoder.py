"""Decode on a CPU: degrees of the cells, peeling with a queue, the shard written front to back."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from tagc.ops.cpu.kernels.bitmap import keys_of
from tagc.ops.cpu.kernels.scalar import (
    N,
    compiled,
    lane_of,
    load,
    positions,
    salts_of,
    store,
    store_finite,
)

_BATCH = 256
_MAX_COMPACT_KEYS = 1 << 20
_DEGREE = np.int64((1 << 24) - 1)


@compiled
def decode_shard(index, cells, n, group, step, seed, divisor, hashes, partition, out, residual):
    """Decode, see :meth:`tagc.ops.sketch.SketchOps.decode`.

    Args:
        index: ``[words + 1]`` uint32, the OR of the ranks' bitmaps and of their poison words.
        cells: ``[cells]`` int32 or float32, the sums; become what peeling leaves in them.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step: float32.
        seed: int32.
        divisor: float32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
        residual: ``[n]`` likewise, updated; or None.

    Returns:
        How many groups are present, and how many of them could not be recovered.
    """
    poison, words = index[index.size - 1], index[: index.size - 1]
    keys = keys_of(words)
    stuck = 0
    if hashes == 0:
        values = cells[keys]
    else:
        salts = salts_of(seed, hashes)
        values, done, where, degree = _recover(keys, salts, partition, cells)
        stuck = keys.size - np.sum(done)
        if stuck and residual is not None:
            _estimate(keys, done, where, degree, cells, n, len(group), step, hashes, residual)
    if poison:
        # A bfloat16 output is an integer array here: 0x7fc0 is its NaN.
        _fill_nan(out)
    else:
        _write(values, keys, n, group, step, divisor, out)
    return keys.size, stuck


def _fill_nan(out):
    """Fill ``out``, ``[n]`` float32 or the bits of bfloat16 as uint16, with NaN."""
    raise NotImplementedError


@overload(_fill_nan)
def _(out):
    if out.dtype == types.uint16:

        def fill_bits(out):
            out[:] = np.uint16(0x7FC0)

        return fill_bits

    def fill(out):
        out[:] = np.nan

    return fill


@compiled
def peel_shard(cells, words, seed, hashes, partition, symbols, stuck):
    """Recover symbols, see :meth:`tagc.ops.sketch.SketchOps.peel`.

    Args:
        cells: ``[cells]`` int32 or float32, the sums.
        words: ``[words]`` uint32, the bitmap of the present groups.
        seed: int32.
        hashes: cells of a key; 0 for a direct layout.
        partition: cells of a partition.
        symbols: ``[groups]`` of the dtype of ``cells``, written.
        stuck: ``[groups]`` bool, written: which groups could not be recovered.
    """
    keys = keys_of(words)
    symbols[:] = 0
    stuck[:] = False
    if hashes == 0:
        for key in keys:
            symbols[key] = cells[key]
        return
    values, done, _, _ = _recover(keys, salts_of(seed, hashes), partition, cells.copy())
    for slot in range(keys.size):
        symbols[keys[slot]] = values[slot]
        stuck[keys[slot]] = done[slot] == 0


@compiled
def _recover(keys, salts, partition, cells):
    """Peel the cells of the present groups.

    Args:
        keys: ``[count]`` uint32, ascending: the present groups.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        cells: ``[cells]`` int32 or float32, the sums; become what is left in them.

    Returns:
        ``[count]`` of the dtype of ``cells``, the symbols by key, 0 where not recovered;
        ``[count]`` uint8, 1 where recovered; ``[count * hashes]`` uint32, the cells of each key;
        ``[cells]`` int32, how many keys are left in each cell.
    """
    where = np.empty(keys.size * salts.size, np.uint32)
    values, degree = np.zeros(keys.size, cells.dtype), np.zeros(cells.size, np.int32)
    done = np.zeros(keys.size, np.uint8)
    _solve(keys, salts, partition, cells, where, values, done, degree)
    return values, done, where, degree


def _solve(keys, salts, partition, cells, where, values, done, degree):
    """Peel as suits the dtype of the cells; writes what :func:`_recover` returns.

    Args:
        keys: ``[count]`` uint32, ascending.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        cells: ``[cells]`` int32 or float32, the sums; become what is left in them.
        where: ``[count * hashes]`` uint32, written.
        values: ``[count]`` of the dtype of ``cells``, zeros, written where recovered.
        done: ``[count]`` uint8, zeros, written where recovered.
        degree: ``[cells]`` int32, written.
    """
    raise NotImplementedError


@overload(_solve)
def _(keys, salts, partition, cells, where, values, done, degree):
    if cells.dtype == types.float32:

        def solve_float(keys, salts, partition, cells, where, values, done, degree):
            left, exact = cells.astype(np.float64), np.zeros(values.size, np.float64)
            _peel_rounds(keys, salts, partition, left, where, exact, done, degree)
            values[:] = exact
            cells[:] = left

        return solve_float

    def solve_integer(keys, salts, partition, cells, where, values, done, degree):
        if keys.size <= _MAX_COMPACT_KEYS and keys.size <= cells.size:
            _peel_compact(keys, salts, partition, cells, where, values, done, degree)
        else:
            _peel_rounds(keys, salts, partition, cells, where, values, done, degree)

    return solve_integer


@compiled
def _build(keys, salts, partition, table, unit, where):
    """Add ``unit * slot + 1`` for every key to the entry of each of its cells; note the cells.

    Args:
        keys: ``[count]`` uint32, ascending; a key's slot is its place here.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        table: ``[cells]`` int64, the entries, added to.
        unit: int64, a power of two: the lowest bit of an entry's sum of slots.
        where: ``[count * hashes]`` uint32, written: the cells of each key.
    """
    hashes = salts.size
    batch = np.empty((hashes, _BATCH), np.uint64)
    for lo in range(0, keys.size, _BATCH):
        count = min(_BATCH, keys.size - lo)
        positions(keys[lo : lo + count], count, salts, partition, batch)
        for i in range(hashes):
            row, at, entry = batch[i], N(lo * hashes + i), unit * lo + 1
            for t in range(N(count)):
                where[at] = row[t]
                at += N(hashes)
                table[row[t]] += entry
                entry += unit


@compiled
def _lonely(table, mask):
    """The cells that hold one key.

    Args:
        table: ``[cells]`` int64, entries whose lowest bits are the number of keys.
        mask: those bits.

    Returns:
        ``[cells + 1]`` uint32, a queue that begins with these cells, and how many they are, uint64.
    """
    queue = np.empty(table.size + 1, np.uint32)
    tail = N(0)
    for c in range(N(table.size)):
        queue[tail] = c
        tail += N(table[c] & mask == 1)
    return queue, tail


@compiled
def _peel_compact(keys, salts, partition, cells, where, values, done, degree):
    """Peel integers with a queue, all that is known of a cell in one 64-bit entry.

    From the top: the sum of the symbols (32 bits, wraps), the sum of the keys' slots (26 bits),
    the number of keys (6 bits). A key leaves a cell by one subtraction. Slots below 2**20 and
    fewer than 64 keys in a cell keep the lower fields from running over; with no more keys than
    cells a fuller cell has probability below 1e-40. The order does not matter to integers.

    Args:
        keys: ``[count]`` uint32, ascending; at most 2**20.
        cells: ``[cells]`` int32, the sums; become what is left in them.
        salts, partition, where, values, done, degree: as in :func:`_solve`.
    """
    hashes = N(salts.size)
    table = np.empty(cells.size, np.int64)
    for c in range(N(cells.size)):
        table[c] = np.int64(cells[c]) << 32
    _build(keys, salts, partition, table, np.int64(64), where)
    queue, tail = _lonely(table, 63)
    head = N(0)
    while head < tail:
        c = queue[head]
        head += N(1)
        entry = table[c]
        if entry & 63 != 1:
            continue
        slot = N((entry >> 6) & (_MAX_COMPACT_KEYS - 1))
        values[slot] = entry >> 32
        done[slot] = 1
        at = slot * hashes
        for i in range(hashes):
            p = where[at + i]
            rest = table[p] - entry
            table[p] = rest
            # Without a branch: a cell enters for good when its degree falls to one, which
            # happens once, so the queue needs no more room than there are cells.
            queue[tail] = p
            tail += N(rest & 63 == 1)
    for c in range(N(cells.size)):
        cells[c], degree[c] = table[c] >> 32, table[c] & 63


@compiled
def _peel_rounds(keys, salts, partition, left, where, values, done, degree):
    """Peel round by round, any dtype and size, reading each key from its first lonely cell.

    Args:
        keys: ``[count]`` uint32, ascending.
        left: ``[cells]`` int32 or float64, the sums; become what is left in them.
        values: ``[count]`` of the dtype of ``left``, zeros, written where recovered.
        salts, partition, where, done, degree: as in :func:`_solve`.
    """
    hashes = N(salts.size)
    # Upper 40 bits the sum of the slots, lower 24 the number of keys.
    table = np.zeros(left.size, np.int64)
    _build(keys, salts, partition, table, np.int64(1 << 24), where)
    queue, tail = _lonely(table, _DEGREE)
    slots = np.empty(done.size, np.uint64)
    head = N(0)
    while head < tail:
        found, end = N(0), tail
        while head < end:
            c = queue[head]
            head += N(1)
            if table[c] & _DEGREE != 1:
                continue
            slot = N(table[c] >> 24)
            at, first = slot * hashes, c
            for i in range(hashes):
                if table[where[at + i]] & _DEGREE == 1:
                    first = where[at + i]
                    break
            if first == c:
                slots[found] = slot
                values[slot] = left[c]
                found += N(1)
        for t in range(found):
            slot = slots[t]
            done[slot] = 1
            at, entry = slot * hashes, (np.int64(slot) << 24) + 1
            for i in range(hashes):
                p = where[at + i]
                left[p] -= values[slot]
                rest = table[p] - entry
                table[p] = rest
                queue[tail] = p
                tail += N(rest & _DEGREE == 1)
    for c in range(N(left.size)):
        degree[c] = table[c] & _DEGREE


@compiled
def _write(values, keys, n, group, step, divisor, out):
    """Dequantize into the output: zeros everywhere, then the groups that are there.

    Args:
        values: ``[count]`` int32 or float32, the symbols by key.
        keys: ``[count]`` uint32, ascending.
        n: elements.
        group: a tuple of as many entries as a symbol has lanes.
        step, divisor: float32.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
    """
    lanes = len(group)
    zero = np.float32(0.0)
    for j in range(N(n)):
        store(out, j, zero)
    for t in range(N(keys.size)):
        base = N(keys[t]) * N(lanes)
        for lane in range(lanes):
            at = base + N(lane)
            if at < N(n):
                store(out, at, _dequantize(values[t], lane, lanes, step) / divisor)


def _dequantize(v, lane, lanes, step):
    """float32 element of lane ``lane`` of ``lanes`` of a symbol, int32 or float32."""
    raise NotImplementedError


@overload(_dequantize, inline="always")
def _(v, lane, lanes, step):
    if v == types.float32:
        return lambda v, lane, lanes, step: v
    return lambda v, lane, lanes, step: np.float32(np.float32(lane_of(v, lane, lanes)) * step)


@compiled
def _estimate(keys, done, where, degree, cells, n, lanes, step, hashes, residual):
    """Give the owner's residual an estimate of what could not be peeled.

    Args:
        keys: ``[count]`` uint32, ascending.
        done: ``[count]`` uint8, 1 where recovered.
        where: ``[count * hashes]`` uint32, the cells of each key.
        degree: ``[cells]`` int32, keys left in each cell.
        cells: ``[cells]`` int32 or float32, what is left in them.
        n: elements.
        lanes: elements of a group.
        step: float32.
        hashes: cells of a key.
        residual: ``[n]`` float32 or the bits of bfloat16 as uint16, updated.
    """
    for slot in range(keys.size):
        if done[slot]:
            continue
        lo = np.int64(keys[slot]) * lanes
        for lane in range(min(lanes, n - lo)):
            share = np.float32(0.0)
            for i in range(hashes):
                p = where[slot * hashes + i]
                share += _dequantize(cells[p], lane, lanes, step) / np.float32(degree[p])
            share /= np.float32(hashes)
            store_finite(residual, lo + lane, load(residual, lo + lane) + share)
