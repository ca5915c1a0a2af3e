"""Select: accumulate gradient and residual, mark the groups to keep, count them. One dense pass.

Per destination (a row) and element, ``x = float32(gradient) + float32(residual)``; per group, its
size is the largest ``|x|``, compared as an integer. A group is marked if it is at least the
threshold, or, when every group may stay, if it is not zero. Non-finite groups are never marked.

Worked example (2 lanes, threshold 3): gradient (1, -4, 0, 2, inf, 0) and residual (1, 1, 0, 0, 0,
5) make x = (2, -3 | 0, 2 | inf, 5): sizes 3, 2 and non-finite, bitmap 0b001, 1 above, 2 not zero,
poison 1.

The residual becomes x, except in non-finite groups, and except that a bfloat16 residual, which
could not hold x exactly, keeps its old value in marked groups: the sparse passes accumulate those
again. Old values are written back rather than masked off, so that every access of the pass is 16
bytes wide; that takes rows that start 16-byte aligned and ``n`` divisible by 16, other segments go
element by element.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.layout import SketchLayout

from .jit import jit, tl
from .scalar import magnitude, narrow_finite, widen, word_of

# Elements per program: 16 per thread keep enough loads in flight.
_TILE = 2048
_WARPS = 4


@jit(do_not_specialize=["words", "threshold", "counts", "index_stride", "counts_stride"])
def select_kernel(
    grad, residual, threshold, index, counts, n, words,
    grad_stride, residual_stride, index_stride, counts_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * WORDS
    start = first * (32 * LANES)
    j = tl.arange(0, WORDS * 32 * LANES)
    inside = j < n - start
    x = widen(tl.load(grad + (d * grad_stride + start) + j, mask=inside, other=0.0))
    if residual is not None:
        place = residual + (d * residual_stride + start) + j
        old = tl.load(place, mask=inside, other=0.0)
        x += widen(old)

    size = tl.max(tl.reshape(magnitude(x), [WORDS, 32, LANES]), 2)  # [WORDS, 32]
    finite = size < 0x7F800000
    above = finite & (size >= tl.load(threshold + d).to(tl.int32, bitcast=True))
    some = finite & (size > 0)
    chosen = some if EVERY else above

    if residual is not None:
        holds_x: tl.constexpr = residual.dtype.element_ty == tl.float32
        replace = finite if holds_x else finite & (chosen == 0)
        replace = tl.broadcast_to(replace[:, :, None], [WORDS, 32, LANES])
        new = narrow_finite(x, residual.dtype.element_ty)
        tl.store(place, tl.where(tl.reshape(replace, j.shape), new, old), mask=inside)

    w = tl.arange(0, WORDS)
    tl.store(index + (d * index_stride + first) + w, word_of(chosen), mask=w < words - first)

    # The three counts share their reductions: 8 bits each within a word, then 16 bits each.
    packed = above.to(tl.int32) | (some.to(tl.int32) << 8) | ((finite == 0).to(tl.int32) << 16)
    packed = tl.sum(packed, 1).to(tl.int64)  # [WORDS]
    total = tl.sum((packed & 0xFF) | ((packed & 0xFF00) << 8) | ((packed & 0xFF0000) << 16), 0)
    row = counts + d * counts_stride
    tl.atomic_add(row, (total & 0xFFFF).to(tl.int32), sem="relaxed")
    tl.atomic_add(row + 1, ((total >> 16) & 0xFFFF).to(tl.int32), sem="relaxed")
    if (total >> 32) > 0:
        tl.store(index + d * index_stride + words, 1)


def select(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    index: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
) -> None:
    """Write bitmaps and poison words, update the residual, count into ``counts[:, :2]``.

    Args:
        grad: ``[W, n]``; residual: ``[W, n]`` or None; threshold: ``[W]``.
        index: ``[W, index_words]``, written.
        counts: ``[W, 4]`` int32, written: groups above the threshold, groups not zero, 0, 0.
    """
    index[:, layout.words].zero_()
    counts.zero_()
    if layout.numel == 0:
        return
    lanes = layout.symbol.lanes
    words = _TILE // (32 * lanes)
    grid = (triton.cdiv(layout.words, words), grad.shape[0])
    select_kernel[grid](
        grad, residual, threshold, index, counts, layout.numel, layout.words,
        grad.stride(0), 0 if residual is None else residual.stride(0), index.stride(0),
        counts.stride(0),
        LANES=lanes, WORDS=words, EVERY=capacity >= layout.groups,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
