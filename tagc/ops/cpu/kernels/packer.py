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
    """1 if the bitmap ``words``, ``[words]`` uint32, has the group ``key``, else 0."""
    return shift_right(words[N(key) >> N(5)], U(key & U(31))) & U(1)


@compiled
def pack_values(e, n, lanes, keys, stream, whole, finite, block, group, limit, unit, scales, codes):
    """Quantize the kept groups, and leave in the residual what the codes do not say.

    Args:
        e: ``[n]``, the residual, float32 or the bits of bfloat16 as uint16, updated; or None.
        n: elements.
        lanes: elements of a group.
        keys: ``[count]`` uint32, ascending: the kept groups.
        stream: ``[count * lanes]`` float32, their x, which becomes what the codes leave; longer by
            a block or more, which is overwritten.
        whole: whether all of ``keys`` are finite; else only the residual of those in ``finite`` is
            written.
        finite: ``[words]`` uint32, the bitmap of the finite groups.
        block: elements of a block.
        group: a tuple of as many entries as a word has codes.
        limit, unit: float32, the largest code and one over it.
        scales: ``[2 * scale_words]`` uint16, written.
        codes: ``[blocks * block_words]`` uint32, written.
    """
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
    """Add the values of keys that lie in one stretch of the output.

    Args:
        keys: ``[count]`` uint32, ascending.
        t: place in ``keys`` of the first to add.
        stop: place after the last.
        start: the group with which ``total`` begins.
        groups: groups of ``total``.
        size: elements of a group.
        values: ``[block]`` float32, the elements of a block.
        within: place in ``values``, in groups, of the first to add.
        total: ``[groups * size]`` float32, added to.

    Returns:
        Place in ``keys`` of the first that was not added: ``stop``, or one that lies elsewhere.
    """
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
    """Add up sparse messages, see :meth:`tagc.ops.packed.PackedOps.unpack`.

    Args:
        messages: ``[...]`` uint32, in which the messages begin ``distance`` words apart.
        distance: from one message to the next, in words.
        ranks: number of messages.
        scales, codes: where scales and codes begin in a message, in words.
        n: elements.
        lanes: elements of a group.
        keys: ``[ranks, ...]`` uint32, each row ascending: the groups of each message; or
            ``[1, ...]`` if all have the same.
        counts: ``[ranks]`` or ``[1]`` int64, how many entries of each row are groups.
        block: elements of a block.
        group: a tuple of as many entries as a word has codes.
        divisor: float32.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
    """
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
