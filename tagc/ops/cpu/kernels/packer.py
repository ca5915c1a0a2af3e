"""Kernels of packed sparse vectors: the sparse pass of packing, and unpacking."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import shift_right
from tagc.ops.cpu.kernels.quantizer import dequantize_block, quantize_block, scale_at
from tagc.ops.cpu.kernels.scalar import N, U, compiled, store, store_finite

# Elements of the output that are added up at a time; a multiple of every group.
_CHUNK = 4096


@compiled
def _has(words, key):
    return shift_right(words[N(key) >> N(5)], U(key & U(31))) & U(1)


@compiled
def pack_values(e, n, lanes, keys, stream, whole, finite, block, group, limit, unit, scales, codes):
    """Quantize the groups ``keys``, ``lanes`` elements each in ``stream``, in place, and leave the
    rest in the residual; unless ``whole``, only of groups in the bitmap ``finite``."""
    c = np.empty(block, np.uint32)
    size, count = N(lanes), N(keys.size)
    elements, per_block = count * size, N(block) // size
    words = N(block // len(group))
    blocks = N(codes.size) // words
    for b in range(blocks):
        lo, hi = b * N(block), (b + N(1)) * N(block)
        if lo >= elements:
            codes[b * words : (b + N(1)) * words] = U(0)
            scales[b] = np.uint16(0)
            continue
        for j in range(elements, hi):
            stream[j] = np.float32(0.0)
        x = stream[lo:hi]
        scale = quantize_block(x, c, group, limit, unit, codes, b * words)
        scales[b] = np.uint16(scale >> U(16))
        if e is None:
            continue
        first = b * per_block
        for t in range(min(per_block, count - first)):
            key = keys[first + t]
            if whole or _has(finite, key):
                at = N(key) * size
                if size == N(1):
                    store_finite(e, at, x[t])
                else:
                    for j in range(min(size, N(n) - at)):
                        store_finite(e, at + j, x[t * size + j])
    for b in range(blocks, N(scales.size)):
        scales[b] = np.uint16(0)


@compiled
def _add_groups(keys, t, stop, start, groups, size, values, within, total):
    """Add ``values`` of keys ``t`` to ``stop`` to ``total``, which begins at group ``start``, up
    to the first that lies elsewhere; returns which that is."""
    if size == N(1):
        while t < stop and N(keys[t]) - start < groups:
            total[N(keys[t]) - start] += values[within]
            within += N(1)
            t += N(1)
        return t
    # A key below ``start`` would be huge: unsigned.
    while t < stop and N(keys[t]) - start < groups:
        at = (N(keys[t]) - start) * size
        for j in range(size):
            total[at + j] += values[within * size + j]
        within += N(1)
        t += N(1)
    return t


@compiled
def unpack_shard(
    messages, distance, ranks, scales, codes, n, lanes, keys, counts, block, group, divisor, out
):
    """Add up the values of messages that begin ``distance`` words apart, with scales and codes
    from ``scales`` and ``codes`` on in each; row ``r`` of ``keys`` (or the only one) says where."""
    total = np.empty(_CHUNK, np.float32)
    held = np.empty((ranks, block), np.float32)
    taken = np.zeros(ranks, np.uint64)
    size, rows = N(lanes), N(keys.shape[0])
    per_block, per_chunk = N(block) // size, N(_CHUNK) // size
    words = N(block // len(group))
    for base in range(N(0), N(n), N(_CHUNK)):
        total[:] = np.float32(0.0)
        start = base // size
        for r in range(N(ranks)):
            row = keys[min(r, rows - N(1))]
            count, values, t = N(counts[min(r, rows - N(1))]), held[r], taken[r]
            while t < count:
                within = t & (per_block - N(1))
                if within == N(0):
                    b, at = t // per_block, r * N(distance)
                    s = scale_at(messages, at + N(scales), b)
                    dequantize_block(messages, at + N(codes) + b * words, group, s, values)
                stop = min(count, t + per_block - within)
                t = _add_groups(row, t, stop, start, per_chunk, size, values, within, total)
                if t < stop:
                    break
            taken[r] = t
        for j in range(min(N(_CHUNK), N(n) - base)):
            store(out, base + j, total[j] / divisor)
