"""The last step of the decoders: sums become elements of the shard, a tile at a time.

A shard is larger than the caches, and whoever decodes it writes it once. So a tile of sums stays in
the L1 cache (one of ``TILE`` elements does) while it is filled, and then goes to memory past the
caches, which spares a read of what is overwritten, and what the caches held. A shard that fits in
the L2 cache is stored as usual: whoever reads it finds it there.

Sums are divided by the number of ranks. Half of the time of a large shard would go into divisions;
where the divisor is a power of two, a product with its reciprocal has the same bits. Example: 3
divided by 8 and 3 * 0.125 are both 0.375; 3 divided by 10 and 3 * 0.1 differ in float32.
"""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import drain, fence, float_bits
from tagc.ops.cpu.kernels.scalar import N, U, compiled, store

# Elements of a tile; a multiple of 256 groups of any size, as ``unpacker`` asks.
TILE = 8192
# float32 of a line of the caches.
_LINE = 16
# Bytes of a shard from which on it goes past the caches.
_LARGE = 1 << 20


@compiled
def new_tile(size, out):
    """A tile of zeros for :func:`write_tile`: ``[size]`` float32.

    It begins as many elements after a multiple of 64 bytes as ``out`` does, so that where a store
    to ``out`` is aligned, the loads and stores of sums are, too: without, they take twice as long.

    Args:
        size: elements; tiles that follow one another all profit if it is a multiple of 16.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, the shard.
    """
    room = np.zeros(N(size) + N(_LINE), np.float32)
    place = N(out.ctypes.data) // N(out.itemsize)
    first = (place - N(room.ctypes.data) // N(room.itemsize)) & N(_LINE - 1)
    return room[first : first + N(size)]


@compiled
def write_tile(sums, count, divisor, out, base):
    """Divide, round and write a tile of the shard, and leave zeros in ``sums``.

    Args:
        sums: ``[...]`` float32, from :func:`new_tile`; what is written becomes zeros.
        count: elements to write.
        divisor: float32.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
        base: the first element to write.
    """
    size, zero = N(count), np.float32(0.0)
    factor = np.float32(1.0) / divisor
    if U(float_bits(divisor) & U(0x007FFFFF)) != U(0):  # no power of two
        for j in range(size):
            sums[j] = sums[j] / divisor
        factor = np.float32(1.0)
    if N(out.size) * N(out.itemsize) < N(_LARGE):
        for j in range(size):
            store(out, base + j, sums[j] * factor)
        for j in range(size):
            sums[j] = zero
        return
    lanes = N(32 // out.itemsize)
    # What lies before the first and past the last multiple of 32 bytes is stored as usual.
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
