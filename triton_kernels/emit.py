"""Emit: quantize the kept groups, leave the rest in the residual, add symbols to the cells.

:mod:`.groups` describes what a group sends and leaves; a symbol is added to one cell per
partition. A program first lists the groups of its words (see :mod:`.stash`), so it touches only
kept groups. Cells are added to by reductions without a result, in no fixed order: sums of integers
do not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .groups import clips, send
from .jit import jit, row_stride, tl, torch_call
from .scalar import narrow_finite, widen
from .scatter import scatter
from .scratch import buffer
from .stash import LANES_OF_A_STEP, STASH, STASH_WORDS, pop, push_bits
from .table import listing_programs

# Arguments whose alignment makes no difference.
_PLAIN = [
    *("words", "partition", "capacity", "step", "seed", "counts"),
    *("index_stride", "cells_stride", "counts_stride"),
]


@jit(do_not_specialize=_PLAIN)
def emit_kernel(
    grad, residual, step, seed, index, cells, counts, stash, n, words, partition, capacity, levels,
    grad_stride, residual_stride, index_stride, cells_stride, counts_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr, STASH: tl.constexpr, BLOCK: tl.constexpr,
    HASHES: tl.constexpr, EVERY: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0)
    row = counts + d * counts_stride
    if not COUNTED:  # noqa: SIM102 - one is static
        if tl.program_id(0) == 0:
            selected = tl.load(row + 1) if EVERY else tl.load(row)
            tl.store(row + 2, tl.minimum(selected, capacity))
    grad += d * grad_stride
    index += d * index_stride
    cells += d * cells_stride
    if residual is not None:
        residual += d * residual_stride
    mine = stash + (d * programs + tl.program_id(0)) * STASH
    seed_value = tl.load(seed)
    unit = tl.load(step + d)
    saturated = tl.zeros([BLOCK], tl.int32)
    count = tl.zeros([], tl.int32)
    for first in range(tl.program_id(0) * WORDS, words, programs * WORDS):
        count = push_bits(mine, count, index, first, words, WORDS)
        flush = first + programs * WORDS >= words
        while (count >= BLOCK) | (flush & (count > 0)):
            key = pop(mine, count, BLOCK)
            count = tl.maximum(count - BLOCK, 0)
            j = tl.expand_dims(key.to(tl.int64), 1) * LANES + tl.arange(0, LANES)  # [BLOCK, LANES]
            inside = tl.expand_dims(key >= 0, 1) & (j < n)
            if residual is not None and residual.dtype.element_ty == tl.float32:
                x = tl.load(residual + j, mask=inside, other=0.0)  # the selection wrote x
            else:
                x = widen(tl.load(grad + j, mask=inside, other=0.0))
                if residual is not None:
                    x += widen(tl.load(residual + j, mask=inside, other=0.0))
            symbol, left = send(x, unit, levels, LANES)
            saturated += clips(x, unit, levels)
            if residual is not None:
                place = residual + j
                tl.store(place, narrow_finite(left, residual.dtype.element_ty), mask=inside)
            scatter(cells, key, symbol, key >= 0, seed_value, partition, HASHES)
    clipped = tl.sum(saturated, 0)
    if clipped > 0:
        tl.atomic_add(row + 3, clipped, sem="relaxed")


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
        counted: whether the kept groups are already counted.
    """
    torch_call(Tensor.zero_, cells)
    if layout.numel == 0:
        return
    W = grad.shape[0]
    programs = listing_programs(layout.words, W)
    stash = buffer("emit", (W * programs * STASH,), torch.int32, grad.device, layout)
    emit_kernel[(programs, W)](
        grad, residual, step, seed, index, cells, counts, stash, layout.numel, layout.words,
        layout.partition, capacity, float(levels), grad.stride(0), row_stride(residual),
        index.stride(0), cells.stride(0), counts.stride(0),
        LANES=layout.symbol.lanes, WORDS=STASH_WORDS, STASH=STASH, BLOCK=LANES_OF_A_STEP,
        HASHES=layout.hashes, EVERY=capacity >= layout.groups, COUNTED=counted, num_warps=1,
    )  # fmt: skip
