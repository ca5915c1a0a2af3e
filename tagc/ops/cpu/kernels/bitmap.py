"""Sets of groups as bitmaps, and as ascending keys."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import popcount, put_places, trailing_zeros
from tagc.ops.cpu.kernels.scalar import N, U, compiled

# Number of entries that ``keys_of`` may write past the last key.
_SLACK = 8
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


@compiled
def keys_of(words):
    """The groups of a bitmap ``[words]`` uint32, two words at a time: ``[count]`` uint32,
    ascending."""
    total, size = count_bits(words), N(words.size)
    keys = np.empty(total + _SLACK, np.uint32)
    dense = N(2) * N(total) >= N(_DENSE) * size
    w, t = N(0), N(0)
    while t < N(total):
        word = N(words[w])
        if w + N(1) < size:
            word |= N(words[w + N(1)]) << N(32)
        first = U(w * N(32))
        w += N(2)
        if dense:
            for i in range(N(8)):
                byte = (word >> (N(8) * i)) & N(255)
                put_places(keys, t, U(first + U(N(8) * i)), _PLACES[byte])
                t += N(popcount(byte))
        else:
            # Four at a time without a branch; the next keys overwrite the surplus.
            end = t + N(popcount(word))
            while True:
                for j in range(N(4)):
                    keys[t + j] = first + U(trailing_zeros(word))
                    word &= word - N(1)
                t += N(4)
                if t >= end:
                    break
            t = end
    return keys[:total]
