"""Decode on a CPU: degrees of the cells, peeling with a queue, the shard written front to back."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from tagc.ops.cpu.llvm import popcount, trailing_zeros
from tagc.ops.cpu.scalar import N, U, compiled, lane_of, load, positions, salts_of, store

_BATCH = 256
# A table entry holds the number of keys left in the upper 24 bits, the sum of their slots below.
_ONE = np.int64(1) << 40
_SLOT = _ONE - 1


@compiled
def decode_shard(index, cells, n, group, step, seed, divisor, hashes, partition, out, residual):
    """:meth:`tagc.ops.Ops.decode` from the OR of the ranks' indexes."""
    poison, words = index[index.size - 1], index[: index.size - 1]
    keys = _keys(words)
    stuck = 0
    if hashes == 0:
        values = cells[keys]
    else:
        salts = salts_of(seed, hashes)
        values, done, where, table = _recover(keys, salts, partition, cells)
        stuck = keys.size - np.sum(done)
        if stuck and residual is not None:
            _estimate(keys, done, where, table, cells, n, len(group), step, hashes, residual)
    if poison:
        # A bfloat16 output is an integer array here: 0x7fc0 is its NaN.
        _fill_nan(out)
    else:
        _write(values, words, n, group, step, divisor, out)
    return keys.size, stuck


def _fill_nan(out):
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
def peel_shard(cells, words, groups, seed, hashes, partition, symbols, stuck):
    keys = _keys(words)
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
def _keys(words):
    """Present groups in ascending order."""
    total = 0
    for w in range(words.size):
        total += popcount(words[w])
    keys = np.empty(total, np.uint32)
    t = 0
    for w in range(words.size):
        word = words[w]
        while word:
            keys[t] = w * 32 + trailing_zeros(word)
            word &= U(word - U(1))
            t += 1
    return keys


@compiled
def _build(keys, salts, partition):
    """Cells of every key ``[K * hashes]`` and the table of degrees and slot sums ``[cells]``."""
    hashes = salts.size
    where = np.empty(keys.size * hashes, np.uint32)
    table = np.zeros(hashes * partition, np.int64)
    batch = np.empty((hashes, _BATCH), np.uint64)
    for lo in range(0, keys.size, _BATCH):
        count = min(_BATCH, keys.size - lo)
        positions(keys[lo : lo + count], count, salts, partition, batch)
        for i in range(hashes):
            row, at, entry = batch[i], N(lo * hashes + i), _ONE + lo
            for t in range(N(count)):
                where[at] = row[t]
                at += N(hashes)
                table[row[t]] += entry
                entry += 1
    return where, table


@compiled
def _lonely(table):
    """Queue that begins with the cells of degree one, and its tail."""
    queue = np.empty(table.size + 1, np.uint32)
    tail = N(0)
    for c in range(N(table.size)):
        queue[tail] = c
        tail += N(table[c] >> 40 == 1)
    return queue, tail


@compiled
def _peel(where, table, left, values, done, hashes):
    """Peel with a queue. Order does not matter to integers, so one pass in any order will do."""
    queue, tail = _lonely(table)
    head = N(0)
    while head < tail:
        c = queue[head]
        head += N(1)
        entry = table[c]
        if entry >> 40 != 1:
            continue
        slot = N(entry & _SLOT)
        value = left[c]
        values[slot] = value
        done[slot] = 1
        at = slot * N(hashes)
        for i in range(N(hashes)):
            p = where[at + i]
            left[p] -= value
            rest = table[p] - entry
            table[p] = rest
            # Without a branch: a cell enters for good when its degree falls to one, which
            # happens once, so the queue needs no more room than there are cells.
            queue[tail] = p
            tail += N(rest >> 40 == 1)


@compiled
def _peel_rounds(where, table, left, values, done, hashes):
    """Peel round by round, reading each key from its first lonely cell (float32 symbols)."""
    queue, tail = _lonely(table)
    slots = np.empty(done.size, np.uint64)
    head = N(0)
    while head < tail:
        found, end = N(0), tail
        while head < end:
            c = queue[head]
            head += N(1)
            if table[c] >> 40 != 1:
                continue
            slot = N(table[c] & _SLOT)
            at, first = slot * N(hashes), c
            for i in range(N(hashes)):
                if table[where[at + i]] >> 40 == 1:
                    first = where[at + i]
                    break
            if first == c:
                slots[found] = slot
                values[slot] = left[c]
                found += N(1)
        for t in range(found):
            slot = slots[t]
            done[slot] = 1
            at, entry = slot * N(hashes), _ONE + np.int64(slot)
            for i in range(N(hashes)):
                p = where[at + i]
                left[p] -= values[slot]
                rest = table[p] - entry
                table[p] = rest
                queue[tail] = p
                tail += N(rest >> 40 == 1)


def _solve(where, table, cells, values, done, hashes):
    raise NotImplementedError


@overload(_solve)
def _(where, table, cells, values, done, hashes):
    if cells.dtype != types.float32:
        return lambda where, table, cells, values, done, hashes: _peel(
            where, table, cells, values, done, hashes
        )

    def wide(where, table, cells, values, done, hashes):
        left, exact = cells.astype(np.float64), np.zeros(values.size, np.float64)
        _peel_rounds(where, table, left, exact, done, hashes)
        values[:] = exact
        cells[:] = left

    return wide


@compiled
def _recover(keys, salts, partition, cells):
    """Values of the present groups in ascending order; what peeling left behind."""
    values, done = np.zeros(keys.size, cells.dtype), np.zeros(keys.size, np.uint8)
    where, table = _build(keys, salts, partition)
    _solve(where, table, cells, values, done, salts.size)
    return values, done, where, table


@compiled
def _write(values, words, n, group, step, divisor, out):
    """Dequantize into the output, front to back; ``values`` follow the set bits of ``words``."""
    lanes = len(group)
    block = 32 * lanes
    zero, t = np.float32(0.0), N(0)
    for w in range(words.size):
        base, fill = N(w * block), N(min(block, n - w * block))
        if fill == N(block):
            for j in range(N(block)):
                store(out, base + j, zero)
        else:
            for j in range(fill):
                store(out, base + j, zero)
        word = words[w]
        while word:
            first = N(trailing_zeros(word) * lanes)
            word &= U(word - U(1))
            for lane in range(lanes):
                at = first + N(lane)
                if at < fill:
                    value = _dequantize(values[t], lane, lanes, step) / divisor
                    store(out, base + at, value)
            t += N(1)


def _dequantize(v, lane, lanes, step):
    raise NotImplementedError


@overload(_dequantize, inline="always")
def _(v, lane, lanes, step):
    if v == types.float32:
        return lambda v, lane, lanes, step: v
    return lambda v, lane, lanes, step: np.float32(np.float32(lane_of(v, lane, lanes)) * step)


@compiled
def _estimate(keys, done, where, table, cells, n, lanes, step, hashes, residual):
    """Give the owner's residual an estimate of what could not be peeled."""
    for slot in range(keys.size):
        if done[slot]:
            continue
        lo = np.int64(keys[slot]) * lanes
        for lane in range(min(lanes, n - lo)):
            share = np.float32(0.0)
            for i in range(hashes):
                p = where[slot * hashes + i]
                share += _dequantize(cells[p], lane, lanes, step) / np.float32(table[p] >> 40)
            share /= np.float32(hashes)
            store(residual, lo + lane, load(residual, lo + lane) + share)
