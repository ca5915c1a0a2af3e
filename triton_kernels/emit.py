"""Emit: quantize what the bitmaps keep, leave the rest in the residual, add symbols to the cells.

Per kept element ``q = rint(clip(x / step, -levels, levels))``; the residual becomes
``x - q * step`` and the group's symbol ``v = Σ qᵢ · 2^(bits·i)`` is added to its cells. The step is
a power of two, so products with it and with its inverse are exact. ``float32`` symbols send x
itself and leave 0.

Worked example (int8x4, step 0.5, levels 3): x = (-0.5, 0.9, 9, 0) gives q = (-1, 2, 3, 0), the
residual (0, -0.1, 7.5, 0) and v = -1 + 2·2^8 + 3·2^16 = 197119, added to one cell per partition;
the group counts as saturated.

The pass reads the bitmap and touches elements and cells of kept groups only. Cells are added to
by reductions without a result, in no fixed order: the same bits for integers, but sums of
``float32`` symbols may differ in their last bits from run to run.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .marked import load_marked
from .scalar import load_words, narrow_finite, rint
from .scatter import scatter

_WORDS = 16
_WARPS = 4
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("words", "partition", "capacity", "step", "seed", "counts"),
    *("index_stride", "cells_stride", "counts_stride"),
]


@jit(do_not_specialize=_PLAIN)
def emit_kernel(
    grad, residual, step, seed, index, cells, counts, n, words, partition, capacity, levels,
    grad_stride, residual_stride, index_stride, cells_stride, counts_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr, HASHES: tl.constexpr, EVERY: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * WORDS
    row = counts + d * counts_stride
    if not COUNTED:  # noqa: SIM102 - one is static
        if tl.program_id(0) == 0:
            selected = tl.load(row + 1) if EVERY else tl.load(row)
            tl.store(row + 2, tl.minimum(selected, capacity))
    grad += d * grad_stride
    index += d * index_stride
    if residual is not None:
        residual += d * residual_stride
    w = tl.arange(0, WORDS)
    word = load_words(index + first + w, w < words - first)
    if tl.max((word != 0).to(tl.int32), 0) == 0:
        return
    kept, x, j, inside = load_marked(grad, residual, index, first, n, words, LANES, WORDS)
    if cells.dtype.element_ty == tl.float32:
        left = tl.zeros_like(x)
        symbol = tl.sum(x, 2)
    else:
        unit = tl.load(step + d)
        # The inverse of 2^k, by negating the exponent.
        inverse = (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        scaled = x * inverse
        q = rint(tl.minimum(tl.maximum(scaled, -levels), levels))
        clipped = tl.max((tl.abs(scaled) > levels).to(tl.int32), 2)  # [WORDS, 32]
        saturated = tl.sum(tl.sum(clipped, 1), 0)
        if saturated > 0:
            tl.atomic_add(row + 3, saturated, sem="relaxed")
        left = x - q * unit
        symbol = tl.sum(q.to(tl.int32) << (tl.arange(0, LANES) * (32 // LANES)), 2)
    if residual is not None:
        place = residual + first * (32 * LANES) + j
        tl.store(place, narrow_finite(left, residual.dtype.element_ty), mask=inside)
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)  # [WORDS, 32]
    key = (first * 32).to(tl.uint32) + group.to(tl.uint32)
    scatter(cells + d * cells_stride, key, symbol, kept, tl.load(seed), partition, HASHES)


def emit(
    grad: Tensor,
    residual: Tensor | None,
    step: Tensor,
    seed: Tensor,
    index: Tensor,
    cells: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    levels: int,
    capacity: int,
    counted: bool,
) -> None:
    """Write the cells ``[W, cells]`` and ``counts[:, 2:]``, update the residual of kept groups.

    Args:
        counted: whether the groups kept are counted already.
    """
    cells.zero_()
    if layout.numel == 0:
        return
    lanes = layout.symbol.lanes
    grid = (triton.cdiv(layout.words, _WORDS), grad.shape[0])
    emit_kernel[grid](
        grad, residual, step, seed, index, cells, counts, layout.numel, layout.words,
        layout.partition, capacity, float(levels), grad.stride(0),
        0 if residual is None else residual.stride(0), index.stride(0), cells.stride(0),
        counts.stride(0),
        LANES=lanes, WORDS=_WORDS, HASHES=layout.hashes, EVERY=capacity >= layout.groups,
        COUNTED=counted, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
