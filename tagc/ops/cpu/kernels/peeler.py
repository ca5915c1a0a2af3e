"""Peels a count sketch on a CPU, with queues of the cells that have one key left.

Example: keys A in cells 0 and 3, B in 0 and 4. Cell 3 has A alone, so its sum is the symbol of A;
without A, cell 0 has B alone.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.kernels.scalar import N, compiled, positions, positions_in, salts_of

_BATCH = 256
_MAX_COMPACT_KEYS = 1 << 20
_DEGREE = np.int64((1 << 24) - 1)


@compiled
def recover(keys, seed, hashes, partition, cells):
    """Peel the cells of the present groups.

    Args:
        keys: ``[count]`` uint32, ascending: the present groups.
        seed: int32.
        hashes: cells of a key.
        partition: cells of a partition.
        cells: ``[cells]`` int32, the sums; cells of unrecovered keys get their remaining sums.

    Returns:
        ``[count]`` int32, the symbols by key, 0 where not recovered;
        ``[count]`` uint8, 1 where recovered; ``[count * hashes]`` uint32, the cells of each key;
        ``[cells]`` int32, the number of keys left in each cell of an unrecovered key. The last two
        are garbage if all keys were recovered.
    """
    salts = salts_of(seed, hashes)
    where = np.empty(keys.size * salts.size, np.uint32)
    values, degree = np.zeros(keys.size, np.int32), np.empty(cells.size, np.int32)
    done = np.zeros(keys.size, np.uint8)
    if keys.size <= _MAX_COMPACT_KEYS and keys.size <= cells.size:
        _peel_compact(keys, salts, partition, cells, where, values, done, degree)
    else:
        _peel_large(keys, salts, partition, cells, where, values, done, degree)
    return values, done, where, degree


@compiled
def _build(keys, salts, partition, table, unit, where):
    """For every key, add ``unit * slot + 1`` to the entries of its cells, and note the cells.

    Args:
        keys: ``[count]`` uint32, ascending; a key's slot is its place in this array.
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


@register_jitable(inline="always")
def _list_lonely(table, begin, end, mask, queue):
    """List the cells that hold one key.

    Args:
        table: ``[cells]`` int64, entries whose lowest bits are the number of keys.
        begin, end: uint64, the range of cells.
        mask: mask of the lowest bits.
        queue: ``[end - begin + 1]`` uint32, or longer, written.

    Returns:
        The number of listed cells, uint64.
    """
    tail = N(0)
    for c in range(begin, end):
        queue[tail] = c
        tail += N(table[c] & mask == 1)
    return tail


@compiled
def _peel_compact(keys, salts, partition, cells, where, values, done, degree):
    """Peel with one queue per partition and one 64-bit entry per cell.

    An entry has, from the top, the sum of the symbols (32 bits, wraps), the sum of the keys' slots
    (26 bits) and the number of keys (6 bits), so one subtraction removes a key from a cell. Slots
    below 2**20 and fewer than 64 keys in a cell keep the lower fields from overflowing; with no
    more keys than cells, a fuller cell has probability below 1e-40.

    The partitions take turns, each until its queue is empty, and stop when none finds a key. The
    cell from which a key was recovered is left unchanged: it has no unrecovered key.

    Args:
        keys: ``[count]`` uint32, ascending; at most 2**20.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        cells: ``[cells]`` int32, the sums; cells of unrecovered keys get their remaining sums.
        where: ``[count * hashes]`` uint32, written if a key is not recovered.
        values: ``[count]`` int32, zeros, written where recovered.
        done: ``[count]`` uint8, zeros, written where recovered.
        degree: ``[cells]`` int32, written if a key is not recovered.
    """
    table = np.empty(cells.size, np.int64)
    for c in range(N(cells.size)):
        table[c] = np.int64(cells[c]) << 32
    row = np.empty(_BATCH, np.uint32)
    for lo in range(0, keys.size, _BATCH):
        count = min(_BATCH, keys.size - lo)
        for i in range(salts.size):
            positions_in(keys[lo : lo + count], count, salts, i, partition, row)
            entry = np.int64(64) * lo + 1
            for t in range(N(count)):
                table[row[t]] += entry
                entry += np.int64(64)
    # A cell enters its queue once, when its degree falls to one. So a queue needs room for a
    # partition, plus one entry for the branchless write of a cell that does not enter.
    room = N(partition) + N(1)
    queues = np.empty((salts.size, room), np.uint32)
    heads, tails = np.zeros(salts.size, np.uint64), np.empty(salts.size, np.uint64)
    for i in range(salts.size):
        begin = N(i) * N(partition)
        tails[i] = _list_lonely(table, begin, begin + N(partition), 63, queues[i])
    owners, entries = np.empty(_BATCH, np.uint32), np.empty(_BATCH, np.int64)
    found, i, idle = N(0), 0, 0
    while idle < salts.size:
        idle = idle + 1 if heads[i] == tails[i] else 0
        while heads[i] < tails[i]:
            count = _take(keys, table, queues[i], heads, tails, i, owners, entries, values, done)
            found += count
            for j in range(salts.size):
                if j != i:
                    positions_in(owners, count, salts, j, partition, row)
                    tails[j] = _remove(table, row, entries, count, queues[j], tails[j])
        i = i + 1 if i + 1 < salts.size else 0
    if found < N(keys.size):
        for c in range(N(cells.size)):
            cells[c], degree[c] = table[c] >> 32, table[c] & 63
        _locate(keys, salts, partition, np.empty((salts.size, _BATCH), np.uint64), where)


@register_jitable(inline="always")
def _take(keys, table, queue, heads, tails, i, owners, entries, values, done):
    """Recover the keys of a batch of a partition's queue, without changing their cells there.

    No key comes twice, because each has one cell in a partition.

    Args:
        keys, values, done: as in :func:`_peel_compact`.
        table: ``[cells]`` int64, the entries.
        queue: ``[...]`` uint32, the cells of partition ``i`` that held one key.
        heads, tails: ``[hashes]`` uint64, the starts and ends of queues; ``heads[i]`` is updated.
        owners: ``[_BATCH]`` uint32, written: the keys.
        entries: ``[_BATCH]`` int64, written: the entries of their cells.

    Returns:
        The number of keys, uint64.
    """
    count, head = N(0), heads[i]
    end = min(head + N(_BATCH), tails[i])
    while head < end:
        entry = table[queue[head]]
        alone = entry & 63 == 1  # if not, its key was found in another partition
        entries[count] = entry
        owners[count] = keys[N((entry >> 6) & (_MAX_COMPACT_KEYS - 1)) if alone else N(0)]
        count += N(alone)
        head += N(1)
    heads[i] = head
    for t in range(count):
        slot = N((entries[t] >> 6) & (_MAX_COMPACT_KEYS - 1))
        values[slot] = entries[t] >> 32
        done[slot] = 1
    return count


@register_jitable(inline="always")
def _remove(table, row, entries, count, queue, tail):
    """Take keys out of their cells in one partition; cells with one key left enter its queue.

    Args:
        table: ``[cells]`` int64, the entries.
        row: ``[count]`` uint32, the keys' cells.
        entries: ``[count]`` int64, subtracted from the cells.
        count: uint64, number of keys.
        queue: ``[...]`` uint32, written from ``tail`` on.
        tail: uint64.

    Returns:
        The new ``tail``, uint64.
    """
    for t in range(count):
        p = row[t]
        rest = table[p] - entries[t]
        table[p] = rest
        # Branchless.
        queue[tail] = p
        tail += N(rest & 63 == 1)
    return tail


@compiled
def _locate(keys, salts, partition, at, where):
    """Note the cells of every key.

    Args:
        keys: ``[count]`` uint32.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        at: ``[hashes, _BATCH]`` uint64, scratch.
        where: ``[count * hashes]`` uint32, written.
    """
    hashes = salts.size
    for lo in range(0, keys.size, _BATCH):
        count = min(_BATCH, keys.size - lo)
        positions(keys[lo : lo + count], count, salts, partition, at)
        for t in range(count):
            for i in range(hashes):
                where[(lo + t) * hashes + i] = at[i, t]


@compiled
def _peel_large(keys, salts, partition, cells, where, values, done, degree):
    """Peel any number of keys with one queue; a cell's sum and its keys are in two tables.

    Args:
        keys: ``[count]`` uint32, ascending.
        cells: ``[cells]`` int32, the sums, which become the remaining sums.
        where, degree: as in :func:`_peel_compact`, always written.
        salts, partition, values, done: as in :func:`_peel_compact`.
    """
    hashes = N(salts.size)
    # The upper 40 bits are the sum of the slots, the lower 24 the number of keys.
    table = np.zeros(cells.size, np.int64)
    _build(keys, salts, partition, table, np.int64(1 << 24), where)
    queue = np.empty(table.size + 1, np.uint32)
    tail = _list_lonely(table, N(0), N(table.size), _DEGREE, queue)
    slots = np.empty(_BATCH, np.uint64)
    head = N(0)
    while head < tail:
        found, end = N(0), min(head + N(_BATCH), tail)
        while head < end:
            c = queue[head]
            head += N(1)
            slot = N(table[c] >> 24)
            if table[c] & _DEGREE == 1 and not done[slot]:  # else it was found in another cell
                slots[found] = slot
                values[slot] = cells[c]
                done[slot] = 1
                found += N(1)
        for t in range(found):
            slot = slots[t]
            at, entry = slot * hashes, (np.int64(slot) << 24) + 1
            for i in range(hashes):
                p = where[at + i]
                cells[p] -= values[slot]
                rest = table[p] - entry
                table[p] = rest
                queue[tail] = p
                tail += N(rest & _DEGREE == 1)
    for c in range(N(cells.size)):
        degree[c] = table[c] & _DEGREE
