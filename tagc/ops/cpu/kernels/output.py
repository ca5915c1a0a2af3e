"""The last step of the decoders: turns sums into elements of the shard, a tile at a time.

A shard is larger than the caches, and a decoder writes it once. So a tile of ``TILE`` sums stays in
the L1 cache while it is filled, and is then written to memory past the caches. This saves a read of
the overwritten memory, and keeps the content of the caches. A shard that fits in the L2 cache is
stored as usual, so that its reader finds it there.

Sums are divided by the number of ranks. Divisions would take half of the time of a large shard. If
the divisor is a power of two, the product with its reciprocal has the same bits. Example: 3 divided
by 8 and 3 * 0.125 are both 0.375; 3 divided by 10 and 3 * 0.1 differ in float32.
"""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import drain, fence, float_bits
from tagc.ops.cpu.kernels.scalar import N, U, compiled, load, store

# Elements of a tile; a multiple of 256 groups of any size, as ``unpacker`` needs.
TILE = 8192
# Number of float32 in a cache line.
_LINE = 16
# From this many bytes, a shard is written past the caches.
_LARGE = 1 << 20


@compiled
def new_tile(size, out):
    """A tile of zeros for :func:`write_tile`: ``[size]`` float32.

    It begins as many elements after a multiple of 64 bytes as ``out`` does. So if a store to
    ``out`` is aligned, the loads and stores of sums also are; otherwise they take twice as long.

    Args:
        size: number of elements; with a multiple of 16, all tiles of a shard are aligned.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, the shard.
    """
    room = np.zeros(N(size) + N(_LINE), np.float32)
    place = N(out.ctypes.data) // N(out.itemsize)
    first = (place - N(room.ctypes.data) // N(room.itemsize)) & N(_LINE - 1)
    return room[first : first + N(size)]


@compiled
def write_tile(sums, count, divisor, add, out, base):
    """Divide, add, round and write a tile of the shard, and set ``sums`` to zero.

    Args:
        sums: ``[...]`` float32, from :func:`new_tile`; the first ``count`` become zeros.
        count: elements to write.
        divisor: float32.
        add: whether to add what ``out`` holds.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
        base: the first element to write.
    """
    size, zero = N(count), np.float32(0.0)
    factor = np.float32(1.0) / divisor
    if U(float_bits(divisor) & U(0x007FFFFF)) != U(0):  # not a power of two
        for j in range(size):
            sums[j] = sums[j] / divisor
        factor = np.float32(1.0)
    if add:
        for j in range(size):
            sums[j] = load(out, base + j) + sums[j] * factor
        factor = np.float32(1.0)
    if N(out.size) * N(out.itemsize) < N(_LARGE):
        for j in range(size):
            store(out, base + j, sums[j] * factor)
        for j in range(size):
            sums[j] = zero
        return
    lanes = N(32 // out.itemsize)
    # Elements before the first and past the last multiple of 32 bytes are stored as usual.
    place = N(out.ctypes.data // out.itemsize) + base
    head = min(size, (lanes - place) & (lanes - N(1)))
    tail = head + ((size - head) & ~(lanes - N(1)))
    for j in range(head):
        store(out, base + j, sums[j] * factor)
        sums[j] = zero
    for j in range(head, tail, lanes):
        drain(sums, j, factor, out, base + j)
    for j in range(tail, size):
        store(out, base + j, sums[j] * factor)
        sums[j] = zero
    if base + size == N(out.size):
        fence()
