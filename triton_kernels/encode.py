"""Sketches are made: encode, and its parts by themselves.

:mod:`.select` (the only dense pass) marks groups and accumulates the residual, :mod:`.trim` clears
marks beyond the capacity. Then a kernel quantizes the kept groups, leaves the rest in the residual,
and adds symbols to the cells; :mod:`.groups` describes what a group sends and leaves. A program
first lists the groups of its words (see :mod:`.table`), so it touches only kept groups.

Key ``k`` owns cell ``(fmix32(k ^ salt_i) * partition) >> 32`` of partition ``i``, one in each of
``hashes`` partitions, or just cell ``k`` in a direct layout. Cells are added to by reductions
without a result, in no fixed order: sums of integers do not depend on it.

Worked example (2 partitions of 4 cells): if key 5 hashes to 0x40000000 and 0xc0000000, its symbol
goes to cells 0x40000000 * 4 >> 32 = 1 and 4 + 3 = 7.

:func:`insert` adds given symbols, a dense vector that a bitmap selects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tagc.ops import ABOVE, KEPT, NONZERO
from tagc.ops.sketch import SketchLayout

from .groups import clips, load_groups, send
from .jit import jit, on_device_of, row_stride, tl, torch_call
from .scalar import narrow_finite
from .scratch import buffer
from .select import select as select_groups
from .table import (
    LANES_OF_A_STEP,
    STASH,
    STASH_WORDS,
    cell_at,
    hash_of,
    listing_programs,
    pop,
    push_bits,
)
from .trim import cleared_histograms, put_off_of, trim


@jit
def scatter(cells, key, symbol, mask, seed, partition, HASHES: tl.constexpr):
    """Add ``symbol`` to the cells of ``key`` (int32); tensors of one shape."""
    if HASHES == 1:
        tl.store(cells + key, symbol, mask=mask)
    else:
        for i in tl.static_range(HASHES):
            cell = cell_at(hash_of(key.to(tl.uint32, bitcast=True), seed, i), partition, i)
            tl.atomic_add(cells + cell, symbol, mask=mask, sem="relaxed")


@jit(do_not_specialize=["groups", "words", "partition", "symbols", "index", "cells", "seed"])
def insert_kernel(
    symbols, index, seed, cells, stash, groups, words, partition,
    WORDS: tl.constexpr, STASH: tl.constexpr, BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    seed_value = tl.load(seed)
    mine = stash + tl.program_id(0) * STASH
    count = tl.zeros([], tl.int32)
    for first in range(tl.program_id(0) * WORDS, words, programs * WORDS):
        count = push_bits(mine, count, index, first, words, WORDS)
        flush = first + programs * WORDS >= words
        while (count >= BLOCK) | (flush & (count > 0)):
            key = pop(mine, count, BLOCK)
            count = tl.maximum(count - BLOCK, 0)
            # Ignore bits past the last group.
            present = (key >= 0) & (key < groups)
            symbol = tl.load(symbols + key, mask=present, other=0)
            scatter(cells, key, symbol, present, seed_value, partition, HASHES)


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
            x, j, inside = load_groups(grad, residual, key, key >= 0, n, LANES)
            symbol, left = send(x, unit, levels, LANES)
            saturated += clips(x, unit, levels)
            if residual is not None:
                place = residual + j
                tl.store(place, narrow_finite(left, residual.dtype.element_ty), mask=inside)
            scatter(cells, key, symbol, key >= 0, seed_value, partition, HASHES)
    clipped = tl.sum(saturated, 0)
    if clipped > 0:
        tl.atomic_add(row + 3, clipped, sem="relaxed")


@on_device_of("grad")
def encode(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    step: Tensor,
    seed: Tensor,
    index: Tensor,
    cells: Tensor,
    counts: Tensor,
    support: Tensor | None = None,
    *,
    layout: SketchLayout,
    levels: int,
    capacity: int,
) -> None:
    """See :func:`tagc.ops.reference.encode`."""
    bitmap, poison = index[:, : layout.words], index[:, layout.words]
    trims = support is None and capacity < layout.groups
    histograms = cleared_histograms(grad, layout) if trims else None
    # Whether the dense pass makes the sketch.
    in_one_pass = layout.direct and (residual is None or residual.dtype == torch.float32)
    direct: dict[str, Any] = {"cells": cells, "step": step, "levels": float(levels)}
    direct = direct if in_one_pass else {}
    select_groups(
        grad, residual, threshold, bitmap, poison, counts, layout=layout, capacity=capacity,
        support=support, put_off=None if histograms is None else put_off_of(histograms), **direct,
    )  # fmt: skip
    if histograms is not None:
        trim(
            grad, residual, threshold, bitmap, counts, histograms,
            layout=layout, capacity=capacity, **direct,
        )  # fmt: skip
    if in_one_pass:
        return
    torch_call(Tensor.zero_, cells)
    if layout.numel:
        W = grad.shape[0]
        programs = listing_programs(layout.words, W)
        stash = buffer("emit", (W * programs * STASH,), torch.int32, grad.device, layout)
        emit_kernel[(programs, W)](
            grad, residual, step, seed, index, cells, counts, stash, layout.numel, layout.words,
            layout.partition, capacity, float(levels), grad.stride(0), row_stride(residual),
            index.stride(0), cells.stride(0), counts.stride(0),
            LANES=layout.symbol.lanes, WORDS=STASH_WORDS, STASH=STASH, BLOCK=LANES_OF_A_STEP,
            HASHES=layout.hashes, EVERY=capacity >= layout.groups, COUNTED=support is not None,
            num_warps=1,
        )  # fmt: skip


@on_device_of("x")
def select(
    x: Tensor,
    threshold: Tensor,
    bitmap: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
) -> None:
    """See :func:`tagc.ops.reference.select`."""
    select_groups(x, None, threshold, bitmap, None, counts, layout=layout, capacity=capacity)
    if capacity < layout.groups:
        histograms = cleared_histograms(x, layout)
        trim(x, None, threshold, bitmap, counts, histograms, layout=layout, capacity=capacity)
        torch_call(_clamp, counts[:, ABOVE], capacity, counts[:, KEPT])
    else:
        torch_call(Tensor.copy_, counts[:, KEPT], counts[:, NONZERO])


def _clamp(x: Tensor, most: int, out: Tensor) -> None:
    torch.clamp(x, max=most, out=out)


@on_device_of("cells")
def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """See :func:`tagc.ops.reference.insert`."""
    torch_call(Tensor.zero_, cells)
    if layout.groups:
        programs = listing_programs(layout.words, 1)
        stash = buffer("insert", (programs * STASH,), torch.int32, cells.device, layout)
        insert_kernel[(programs,)](
            symbols, index, seed, cells, stash, layout.groups, layout.words, layout.partition,
            WORDS=STASH_WORDS, STASH=STASH, BLOCK=LANES_OF_A_STEP, HASHES=layout.hashes,
            num_warps=1,
        )  # fmt: skip
