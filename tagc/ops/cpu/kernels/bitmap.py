"""Sets of groups as bitmaps, as ascending keys, and as Elias-Fano codes."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from tagc.ops.cpu.kernels.llvm import popcount, put_places, shift_left, shift_right, trailing_zeros
from tagc.ops.cpu.kernels.scalar import N, U, compiled

# Number of entries that ``list_groups`` and ``write_keys`` may write past the last key.
SLACK = 72
# For every byte, the places of its set bits, one byte each, then zeros.
_PLACES = np.array(
    [
        sum(place << 8 * i for i, place in enumerate(p for p in range(8) if byte >> p & 1))
        for byte in range(256)
    ],
    np.uint64,
)
# From this many set bits in 64, a table of bytes is faster than one bit at a time.
_DENSE = 5


@compiled
def count_bits(words):
    """Number of set bits of ``words``, ``[words]`` uint32; int64."""
    total = 0
    for w in range(N(words.size)):
        total += popcount(words[w])
    return total


@register_jitable(inline="always")
def list_groups(words, at, w, size, dense, keys, to, t, room):
    """List groups of a bitmap in ascending order, two words at a time, until there are enough.

    Args:
        words: ``[...]`` uint32, in which the bitmap begins at ``at``.
        w: uint64, the bitmap's word to start with.
        size: uint64, words of the bitmap.
        dense: whether many bits are set, for speed.
        keys: ``[...]`` uint32; up to ``room + SLACK`` entries are written from ``to`` on, with
            garbage after the last key.
        t: uint64, number of keys already listed.
        room: uint64, number of keys that are enough; fewer than 64 more may be listed.

    Returns:
        The first word that was not listed, and the number of keys, uint64.
    """
    while t < room and w < size:
        word = N(words[at + w])
        if w + N(1) < size:
            word |= N(words[at + w + N(1)]) << N(32)
        first = U(w * N(32))
        w += N(2)
        if dense:
            for i in range(N(8)):
                byte = (word >> (N(8) * i)) & N(255)
                put_places(keys, to + t, U(first + U(N(8) * i)), _PLACES[byte])
                t += N(popcount(byte))
        else:
            # Four at a time without a branch; the next keys overwrite the surplus.
            end = t + N(popcount(word))
            while True:
                for j in range(N(4)):
                    keys[to + t + j] = first + U(trailing_zeros(word))
                    word &= word - N(1)
                t += N(4)
                if t >= end:
                    break
            t = end
    return min(w, size), t


@register_jitable(inline="always")
def is_dense(words, count):
    """Whether a bitmap of ``words`` words with ``count`` bits set is dense to ``list_groups``."""
    return N(2) * N(count) >= N(_DENSE) * N(words)


@compiled
def write_keys(words, keys, room):
    """List the first ``room`` groups of a bitmap in ascending order.

    Args:
        words: ``[words]`` uint32, the bitmap.
        keys: ``[room + SLACK]`` uint32, written, with garbage after the last group.
        room: number of groups that fit.

    Returns:
        The number of listed groups, uint64.
    """
    none, size = N(0), N(words.size)
    dense = is_dense(words.size, count_bits(words))
    _, t = list_groups(words, none, none, size, dense, keys, none, none, N(room))
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
    """Read the first ``room`` keys of the Elias-Fano code of :mod:`tagc.ops.packed`.

    Args:
        low_bits: bits of a low part, 1 to 16.
        low: ``[low_words]`` uint32, the low parts.
        high: ``[high_words]`` uint32, the bitmap of the high parts.
        keys: ``[room + SLACK]`` uint32, written, ascending, with garbage after the last key.
        room: number of keys that fit.

    Returns:
        The number of keys read, uint64.
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
        keys: ``[count]`` uint32; keys from ``groups`` on are left out.
        groups: number of groups.
        words: ``[words]`` uint32, written.
    """
    words[:] = U(0)
    for i in range(N(keys.size)):
        key = keys[i]
        if key < U(groups):
            words[N(key) >> N(5)] |= shift_left(U(1), U(key & U(31)))
