"""Estimate: count the unresolved keys, and add their estimates to the owner's residual.

An unresolved key's estimate is the mean over its cells of the cell's remaining sum, shared equally
among the cell's remaining keys: ``Σᵢ (left[cᵢ] * step / degree[cᵢ]) / hashes``, in float32, in the
order of the partitions.

The first kernel subtracts the hashes of the remaining keys from packed entries, so that an entry is
value and degree, without carries between them.

Worked example (2 hashes, step 1): keys 0 and 1, symbols 5 and 7, share cells 0 and 2, both of which
keep (12, 2). Each key's estimate is (12 / 2 + 12 / 2) / 2 = 6.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .hashing import cell_at, hash_of
from .jit import cdiv, jit, tl
from .keys import contribution
from .scalar import (
    bits_of,
    lane_sums,
    load_words,
    magnitude,
    narrow_finite,
    popcount,
    widen,
)
from .table import Table, packed

# Words of a program, and words whose keys it processes at once.
_BLOCK, _WORDS = 1024, 4
_WARPS = 4


@jit
def _keys(marks, first, words, WORDS: tl.constexpr):
    """The groups of ``WORDS`` words, int32, and whether they are marked; ``[WORDS * 32]``."""
    w = first + tl.arange(0, WORDS)
    marked = bits_of(load_words(marks + w, w < words))
    key = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)
    return tl.reshape(key, [WORDS * 32]), tl.reshape(marked, [WORDS * 32])


@jit(do_not_specialize=["words", "partition", "seed"])
def clear_kernel(
    entry, marks, seed, words, partition,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BLOCK
    w = begin + tl.arange(0, BLOCK)
    if tl.max((load_words(marks + w, w < words) != 0).to(tl.int32), 0) > 0:
        seed_value = tl.load(seed)
        for first in range(begin, tl.minimum(begin + BLOCK, words), WORDS):
            key, stuck = _keys(marks, first, words, WORDS)
            for i in tl.static_range(HASHES):
                h = hash_of(key.to(tl.uint32, bitcast=True), seed_value, i)
                taken = 1 - contribution(key, h, True)
                cell = cell_at(h, partition, i)
                tl.atomic_add(entry + cell, taken, mask=stuck, sem="relaxed")


@jit(do_not_specialize=["words", "partition", "seed", "step", "stats"])
def estimate_kernel(
    entry, value, marks, stats, seed, step, residual, n, words, partition,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, LANES: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * BLOCK
    w = begin + tl.arange(0, BLOCK)
    count = tl.sum(popcount(load_words(marks + w, w < words)), 0)
    if count > 0:
        tl.atomic_add(stats + 1, count, sem="relaxed")
        if residual is not None:
            seed_value = tl.load(seed)
            unit = tl.load(step)
            for first in range(begin, tl.minimum(begin + BLOCK, words), WORDS):
                key, stuck = _keys(marks, first, words, WORDS)
                share = tl.zeros([WORDS * 32, LANES], tl.float32)
                for i in tl.static_range(HASHES):
                    h = hash_of(key.to(tl.uint32, bitcast=True), seed_value, i)
                    cell = cell_at(h, partition, i)
                    seen = tl.load(entry + cell, mask=stuck, other=1)
                    if value is None:
                        left = (seen >> 32).to(tl.int32)
                    else:
                        left = tl.load(value + cell, mask=stuck, other=0)
                    x = lane_sums(left, LANES).to(tl.float32) * unit
                    degree = seen.to(tl.int32).to(tl.float32)
                    share += tl.div_rn(x, tl.zeros_like(x) + tl.expand_dims(degree, 1))
                share = tl.div_rn(share, tl.zeros_like(share) + HASHES)
                j = tl.expand_dims(key.to(tl.int64), 1) * LANES + tl.arange(0, LANES)
                owed = tl.expand_dims(stuck, 1) & (j < n)
                x = widen(tl.load(residual + j, mask=owed, other=0.0)) + share
                dtype: tl.constexpr = residual.dtype.element_ty
                finite = magnitude(x) < 0x7F800000
                x = tl.where(finite, narrow_finite(x, dtype), x.to(dtype))
                tl.store(residual + j, x, mask=owed)


def estimate(
    step: Tensor,
    seed: Tensor,
    residual: Tensor | None,
    stats: Tensor,
    table: Table,
    *,
    layout: SketchLayout,
) -> None:
    """Write ``stats[1]``, the number of unresolved keys; add their estimates to ``residual``."""
    if layout.groups == 0:
        return
    t, grid = table, (cdiv(layout.words, _BLOCK),)
    shape = {
        "BLOCK": _BLOCK, "WORDS": _WORDS, "HASHES": layout.hashes, "num_warps": _WARPS,
    }  # fmt: skip
    if residual is not None and packed(layout):
        clear_kernel[grid](t.entry, t.open, seed, layout.words, layout.partition, **shape)
    estimate_kernel[grid](
        t.entry, t.value, t.open, stats, seed, step, residual, layout.numel, layout.words,
        layout.partition, LANES=layout.symbol.lanes, **shape,
    )  # fmt: skip
