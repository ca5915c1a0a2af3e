"""The sparse pass of packing: quantizes the kept groups."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.quantizer import quantize_block
from tagc.ops.cpu.kernels.scalar import N, U, compiled, store_finite


@compiled
def pack_values(e, n, lanes, keys, stream, block, group, limit, unit, scales, codes):
    """Quantize the kept groups; the residual keeps the quantization error.

    Args:
        e: ``[n]``, the residual, float32 or the bits of bfloat16 as uint16, updated; or None.
        n: elements.
        lanes: elements of a group.
        keys: ``[count]`` uint32, ascending: the kept groups.
        stream: ``[count * lanes]`` float32, their x, which becomes the quantization error; longer
            by at least a block, which is overwritten.
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
        scale = quantize_block(x, c, group, limit, unit, None, N(0), codes, b * words)
        scales[b] = np.uint16(scale >> U(16))
        if e is None:
            continue
        first = b * per_block
        for t in range(min(per_block, count - first)):
            at = N(keys[first + t]) * size
            if size == N(1):
                store_finite(e, at, x[t])
            else:
                for j in range(min(size, N(n) - at)):
                    store_finite(e, at + j, x[t * size + j])
    for b in range(blocks, N(scales.size)):
        scales[b] = np.uint16(0)
