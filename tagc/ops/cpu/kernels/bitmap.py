"""Sets of groups: as bitmaps, as keys in ascending order, as Elias-Fano."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import popcount, shift_left, shift_right, trailing_zeros
from tagc.ops.cpu.kernels.scalar import N, U, compiled

# How far past the last key ``write_keys`` may write.
SLACK = 40


@compiled
def count_bits(words):
    """Number of set bits of ``words``, ``[words]`` uint32; int64."""
    total = 0
    for w in range(N(words.size)):
        total += popcount(words[w])
    return total


@compiled
def write_keys(words, keys, room):
    """List the groups of a bitmap in ascending order, the first ``room`` of them.

    Args:
        words: ``[words]`` uint32, the bitmap.
        keys: ``[room + SLACK]`` uint32, written; what follows the last group is garbage.
        room: groups that fit.

    Returns:
        How many groups are listed, uint64.
    """
    t = N(0)
    for w in range(N(words.size)):
        word = words[w]
        if word == U(0):
            continue
        # Four at a time without a branch; what runs past the last set bit is overwritten next.
        end = t + N(popcount(word))
        while True:
            for _ in range(4):
                keys[t] = U(w) * U(32) + U(trailing_zeros(word))
                word &= U(word - U(1))
                t += N(1)
            if t >= end:
                break
        t = end
        if t >= N(room):
            break
    return min(t, N(room))


@compiled
def keys_of(words):
    """The groups of a bitmap ``[words]`` uint32: ``[count]`` uint32, ascending."""
    total = count_bits(words)
    keys = np.empty(total + SLACK, np.uint32)
    write_keys(words, keys, total)
    return keys[:total]


@compiled
def write_index(keys, low_bits, low, high):
    """Write the Elias-Fano code of :mod:`tagc.ops.packed`.

    Args:
        keys: ``[count]`` uint32, ascending.
        low_bits: bits of a low part, 1 to 16.
        low: ``[low_words]`` uint32, written: the low parts.
        high: ``[high_words]`` uint32, written: the bitmap of the high parts.
    """
    width = N(low_bits)
    mask = N((N(1) << width) - N(1))
    low[:] = U(0)
    high[:] = U(0)
    for i in range(N(keys.size)):
        key = N(keys[i])
        at = i * width
        low[at >> N(5)] |= shift_left(U(key & mask), U(at & N(31)))
        at = (key >> width) + i
        high[at >> N(5)] |= shift_left(U(1), U(at & N(31)))


@compiled
def read_index(low_bits, low, high, keys, room):
    """Read the Elias-Fano code of :mod:`tagc.ops.packed`, the first ``room`` keys.

    Args:
        low_bits: bits of a low part, 1 to 16.
        low: ``[low_words]`` uint32, the low parts.
        high: ``[high_words]`` uint32, the bitmap of the high parts.
        keys: ``[room + SLACK]`` uint32, written, ascending; what follows the last key is garbage.
        room: keys that fit.

    Returns:
        How many keys are read, uint64.
    """
    count = write_keys(high, keys, room)
    width = N(low_bits)
    mask = U((N(1) << width) - N(1))
    for i in range(count):
        at = i * width
        part = shift_right(low[at >> N(5)], U(at & N(31))) & mask
        keys[i] = U(shift_left(U(keys[i] - U(i)), U(width)) | part)
    return count


@compiled
def write_bitmap(keys, groups, words):
    """Mark groups in a bitmap.

    Args:
        keys: ``[count]`` uint32; those that are not below ``groups`` are left out.
        groups: number of groups.
        words: ``[words]`` uint32, written.
    """
    words[:] = U(0)
    for i in range(N(keys.size)):
        key = keys[i]
        if key < U(groups):
            words[N(key) >> N(5)] |= shift_left(U(1), U(key & U(31)))
