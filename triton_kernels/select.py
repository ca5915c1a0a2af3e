"""Select: accumulate gradient and residual, mark the groups to keep, count them. One dense pass.

For each destination (a row) and element, ``x = float32(gradient) + float32(residual)``. The size of
a group is its largest ``|x|``, compared as an integer. A group is marked if its size is at least
the threshold or, when every group may stay, not zero. Non-finite groups are never marked.

Worked example (2 lanes, threshold 3): gradient (1, -4, 0, 2, inf, 0) and residual (1, 1, 0, 0, 0,
5) make x = (2, -3 | 0, 2 | inf, 5): sizes 3, 2 and non-finite, bitmap 0b001, 1 above, 2 not zero,
poison 1.

The marks may also be given, as a support. Then the bitmap gets the marks of finite groups.

The residual becomes x, except in non-finite groups. A bfloat16 residual, which could not hold x
exactly, also keeps its old value in marked groups, which the sparse passes accumulate again. Old
values are written back, not masked off, so that every access of the pass is 16 bytes wide. That
needs rows that are 16-byte aligned and ``n`` divisible by 16; other segments are processed element
by element.

If every group has its own cell (a direct sketch), the pass also writes the cells, and the residual
keeps the quantization error (:mod:`.groups`), so that nothing is left to do: nothing is listed,
cleared or read twice. :mod:`.trim` restores x of a group from its cell and its residual. It clears
the cells of dropped groups, and puts their x back. This restores the bits of x, except for elements
of 2**24 steps and more, and for -0. If groups may be dropped, groups with such elements are put
off: they keep x, their cell is 0, and they are counted; trimming sends those that stay. A bfloat16
residual cannot restore x, so :mod:`.encode` sends its groups.

Worked example (int8x4, step 0.5, levels 3, capacity 1): for the groups (1, 0, 0, 0) and (2, 0, 0,
0.1) the dense pass writes the cells 2 and 3 (3 is clipped), and the residuals (0, 0, 0, 0) and
(0.5, 0, 0, 0.1). The first group is dropped: its cell becomes 0, its residual 0 + 2 * 0.5.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .groups import clips, restore, send
from .jit import cdiv, jit, row_stride, tl, torch_call
from .scalar import bits_of, load_bitmap, magnitude, narrow_finite, popcount, widen, word_of

# Elements per program: 16 per thread keep enough loads in flight. Their counts fit 12 bits.
_TILE = 2048
_WARPS = 4


# Arguments whose alignment makes no difference.
_PLAIN = [
    *("words", "threshold", "poison", "counts"),
    *("support_stride", "index_stride", "poison_stride", "counts_stride"),
    *("step", "put_off", "put_off_stride"),
]


@jit(do_not_specialize=_PLAIN)
def select_kernel(
    grad, residual, threshold, support, index, poison, counts, cells, step, levels, put_off, n,
    words, grad_stride, residual_stride, support_stride, index_stride, poison_stride,
    counts_stride, cells_stride, put_off_stride,
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

    w = tl.arange(0, WORDS)
    size = tl.max(tl.reshape(magnitude(x), [WORDS, 32, LANES]), 2)  # [WORDS, 32]
    finite = size < 0x7F800000
    above = finite & (size >= tl.load(threshold + d).to(tl.int32, bitcast=True))
    chosen = above
    if support is not None:
        given = load_bitmap(support + d * support_stride, first + w, tl.cdiv(n, LANES))
        chosen = bits_of(given) & finite
    elif EVERY:
        chosen = finite & (size > 0)
    word = word_of(chosen)
    tl.store(index + (d * index_stride + first) + w, word, mask=w < words - first)
    marked = popcount(word.to(tl.uint32, bitcast=True))
    count = tl.sum(above.to(tl.int32), 1) if EVERY or support is not None else marked

    row = counts + d * counts_stride
    if cells is not None:
        unit = tl.load(step + d)
        lanes = tl.reshape(x, [WORDS, 32, LANES])
        symbol, left = send(lanes, unit, levels, LANES)
        sent = chosen
        if put_off is not None:
            again = restore(symbol, left, unit, LANES)
            differs = again.to(tl.int32, bitcast=True) ^ lanes.to(tl.int32, bitcast=True)
            sent = chosen & (tl.max((differs != 0).to(tl.int32), 2) == 0)
            # Not as a sum of bools, which LLVM may gather in a thread's local memory.
            late = tl.sum(popcount(word_of(chosen & (sent == 0)).to(tl.uint32, bitcast=True)), 0)
            if late > 0:  # seldom
                tl.atomic_add(put_off + d * put_off_stride, late, sem="relaxed")
        group = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        mine = group < tl.cdiv(n, LANES) - first * 32
        cell = cells + (d * cells_stride + first * 32) + group
        tl.store(cell, tl.where(sent, symbol, 0), mask=mine)
        x = tl.reshape(tl.where(sent[:, :, None], left, lanes), j.shape)
        clipped = tl.where(sent, clips(lanes, unit, levels), 0)
        clipped = tl.sum(tl.sum(clipped, 1), 0)
        if clipped > 0:
            tl.atomic_add(row + 3, clipped, sem="relaxed")

    if residual is not None:
        holds_x: tl.constexpr = residual.dtype.element_ty == tl.float32
        replace = finite if holds_x else finite & (chosen == 0)
        replace = tl.broadcast_to(replace[:, :, None], [WORDS, 32, LANES])
        new = narrow_finite(x, residual.dtype.element_ty)
        tl.store(place, tl.where(tl.reshape(replace, j.shape), new, old), mask=inside)

    # The counts, and the count of words with a non-finite group, share a reduction.
    nonzero = tl.sum(tl.minimum(size, 1), 1)  # [WORDS]
    infinite = (tl.max(size, 1) >= 0x7F800000).to(tl.int32)
    total = tl.sum(count | (nonzero << 12) | (infinite << 24), 0)
    nonzero = (total >> 12) & 0xFFF
    if (total >> 24) > 0:  # seldom
        nonzero -= tl.sum(tl.sum((finite == 0).to(tl.int32), 1), 0)
        if poison is not None:
            tl.store(poison + d * poison_stride, 1)
    tl.atomic_add(row, total & 0xFFF, sem="relaxed")
    tl.atomic_add(row + 1, nonzero, sem="relaxed")
    if support is not None or cells is not None:
        tl.atomic_add(row + 2, tl.sum(marked, 0), sem="relaxed")


def select(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    index: Tensor,
    poison: Tensor | None,
    counts: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
    support: Tensor | None = None,
    cells: Tensor | None = None,
    step: Tensor | None = None,
    levels: float = 0.0,
    put_off: Tensor | None = None,
) -> None:
    """Write bitmaps and poison words, update the residual, count into ``counts[:, :2]``.

    Args:
        grad: ``[W, n]``; residual: ``[W, n]`` or None; threshold: ``[W]``.
        index: ``[W, words]``, bitmaps, written.
        poison: ``[W]`` int32, written: 1 if a group is not finite, else 0; or None.
        counts: ``[W, 4]`` int32, written: groups above the threshold, groups not zero, groups
            marked (0 without a support or cells), groups with a clipped element (only with cells).
        capacity: number of groups that may stay, see :mod:`.trim`; if there are no more groups, all
            may.
        support: ``[W, words]``, given marks.
        cells: of a direct sketch, ``[W, groups]`` int32, written. ``step``, ``[W]`` float32 powers
            of two, and ``levels``, the largest magnitude of a lane, belong to them; the residual is
            then None or float32.
        put_off: ``[W]`` int32, given if groups may be dropped: with cells, the number of groups put
            off is added.
    """
    if poison is not None:
        torch_call(Tensor.zero_, poison)
    torch_call(Tensor.zero_, counts)
    (W, numel), lanes = grad.shape, layout.symbol.lanes
    if numel == 0:
        return
    words = _TILE // (32 * lanes)
    # Without a residual, no x has to be restored.
    late = None if cells is None or residual is None else put_off
    select_kernel[(cdiv(index.shape[1], words), W)](
        grad, residual, threshold, support, index, poison, counts, cells, step, levels, late, numel,
        index.shape[1], grad.stride(0), row_stride(residual), row_stride(support), index.stride(0),
        row_stride(poison), counts.stride(0), row_stride(cells), row_stride(late),
        LANES=lanes, WORDS=words, EVERY=capacity >= layout.groups, num_warps=_WARPS,
    )  # fmt: skip
