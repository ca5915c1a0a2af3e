"""Peels a count sketch, with a queue of the cells that have one key left.

Example: keys A in cells 0 and 3, B in 0 and 4. Cell 3 has A alone, so its sum is the symbol of A;
without A, cell 0 has B alone.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.arrays import N, U, compiled, fmix32


@register_jitable(inline="always")
def cell_of(key, salt, i, partition):
    """The cell of a key in partition ``i``, whose salt this is."""
    return N(i) * N(partition) + ((N(fmix32(U(key ^ salt))) * N(partition)) >> N(32))


@compiled
def salts_of(seed, hashes):
    """One salt for each hash of a key: ``[hashes]`` uint32 from an int32 seed."""
    salts = np.empty(hashes, np.uint32)
    for i in range(hashes):
        salts[i] = fmix32(U(U(seed) * U(0x9E3779B9) + U(U(i + 1) * U(0x7F4A7C15))))
    return salts


@compiled
def recover(keys, salts, partition, cells):
    """Peel the cells of the present groups.

    ``slots[c]`` is the sum of the places in ``keys`` of the keys that are left in cell ``c``: if
    one is left, it is that one.

    Args:
        keys: ``[count]`` uint32: the present groups.
        salts: ``[hashes]`` uint32.
        partition: cells of a partition.
        cells: ``[cells]`` int32, the sums, which become the remaining sums.

    Returns:
        ``[count]`` int32, the symbols by key, 0 where not recovered; ``[count]`` uint8, 1 where
        recovered; ``[cells]`` int32, the number of keys left in each cell.
    """
    values, done = np.zeros(keys.size, np.int32), np.zeros(keys.size, np.uint8)
    degree, slots = np.zeros(cells.size, np.int32), np.zeros(cells.size, np.uint32)
    for i in range(salts.size):
        for t in range(N(keys.size)):
            c = cell_of(keys[t], salts[i], i, partition)
            degree[c] += np.int32(1)
            slots[c] = U(slots[c] + U(t))
    # A cell enters the queue once, when its degree falls to one.
    queue = np.empty(cells.size, np.uint32)
    head, tail = N(0), N(0)
    for c in range(N(cells.size)):
        if degree[c] == 1:
            queue[tail] = c
            tail += N(1)
    while head < tail:
        found = queue[head]
        head += N(1)
        if degree[found] != 1:  # its key was found in another cell
            continue
        slot, value = N(slots[found]), cells[found]
        values[slot], done[slot] = value, 1
        for i in range(salts.size):
            c = cell_of(keys[slot], salts[i], i, partition)
            cells[c] = np.int32(cells[c] - value)
            slots[c] = U(slots[c] - U(slot))
            degree[c] -= np.int32(1)
            if degree[c] == 1:
                queue[tail] = c
                tail += N(1)
    return values, done, degree
