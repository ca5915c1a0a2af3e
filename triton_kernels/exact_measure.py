"""Choose the widths of exact changes, and count the words of each block of a message.

Four launches: count elements by class and length of ``z + 1``; choose the widths of each class;
count the bits of each block; and sum these up.

Worked example: a class of 64 elements, of which 62 have the length 1 and two the length 2, is
listed, and has 2 bits in level 2: that takes 2 * (5 + 1) + (64 >> 5) + 2 * 2 = 18 bits, and one bit
for each element and then 2 bits would take 68.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.exact import CLASSES, MANTISSA, ExactLayout

from .exact_code import change, elias_fano, length, load_patterns, ones, warps_of, where_of
from .jit import cdiv, jit, on_device_of, tl, torch_call
from .scratch import buffer

# Blocks that a program counts before it adds to the counts of all.
_EACH = 16
# Numbers that the only program of the last launch adds up at a time.
_SCAN, _SCAN_WARPS = 4096, 8
_BINS = 32 * CLASSES


@jit(do_not_specialize=["blocks"])
def exact_counts_kernel(
    new, old, where, counts, blocks, EACH: tl.constexpr, BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * EACH
    bins = tl.arange(0, BINS)
    found = tl.zeros([BINS], tl.int32)
    span = tl.load(where + 2 * blocks + first)
    j = tl.arange(0, BLOCK)
    for b in range(first, tl.minimum(first + EACH, blocks)):
        other = tl.load(where + 2 * blocks + b)
        if other != span:
            tl.atomic_add(counts + span * BINS + bins, found, mask=found > 0, sem="relaxed")
            found = tl.zeros([BINS], tl.int32)
            span = other
        start, fill = tl.load(where + b), tl.load(where + blocks + b).to(tl.int32)
        inside = j < fill
        k = load_patterns(old + start, j, inside)
        z = change(load_patterns(new + start, j, inside), k)
        key = ((k >> MANTISSA) & 31) * 32 + length(z + 1)
        found += tl.histogram(tl.where(inside, key, 0), BINS)  # nothing has the length 0
    tl.atomic_add(counts + span * BINS + bins, found, mask=found > 0, sem="relaxed")


@jit
def exact_widths_kernel(counts, table):
    c = tl.program_id(0)
    lengths = tl.arange(0, 32)
    count = tl.load(counts + c * 32 + lengths)
    count = tl.where(lengths > 0, count, 0)
    number = tl.sum(count, 0)
    moved = tl.sum(tl.where(lengths > 1, count, 0), 0)
    number64, moved64 = number.to(tl.int64), moved.to(tl.int64)
    low = tl.full([], 0, tl.int64)
    for i in tl.static_range(1, 31):
        low += ((moved64 << i) <= number64).to(tl.int64)
    listed = tl.where(moved > 0, moved64 * (low + 1) + (number64 >> low), 0)
    entry = tl.arange(0, 256)
    b1, b2 = entry & 15, entry >> 4
    once = tl.maximum(b1, 1)
    twice = tl.maximum(once, b2)
    above = tl.sum(tl.where(lengths[None, :] > once[:, None], count[None, :], 0), 1).to(tl.int64)
    again = tl.sum(tl.where(lengths[None, :] > twice[:, None], count[None, :], 0), 1).to(tl.int64)
    bits = tl.where(b1 > 0, number64 * b1, listed) + above * b2 + 16 * again
    best = tl.min(bits * 256 + entry, 0)
    tl.store(table + c, (best & 255).to(tl.int32))
    tl.store(counts + c * 32, moved)  # for the total


@jit(do_not_specialize=["blocks"])
def exact_sizes_kernel(
    new, old, where, table, sizes, blocks, BLOCK: tl.constexpr, MANTISSA: tl.constexpr
):
    b = tl.program_id(0)
    start, fill = tl.load(where + b), tl.load(where + blocks + b).to(tl.int32)
    span = tl.load(where + 2 * blocks + b)
    j = tl.arange(0, BLOCK)
    inside = j < fill
    k = load_patterns(old + start, j, inside)
    z = change(load_patterns(new + start, j, inside), k)
    entry = tl.load(table + span * 32 + ((k >> MANTISSA) & 31), mask=inside, other=0)
    b1, b2 = entry & 15, entry >> 4
    escaped = inside & (z >= tl.maximum(ones(b1), 1))
    deeper = tl.where(z >= ones(b2), 16, 0)
    bits = tl.sum(b1 + tl.where(escaped, b2 + deeper, 0), 0)
    n = tl.sum((escaped & (b1 == 0)).to(tl.int32), 0)
    sparse = tl.sum((inside & (b1 == 0)).to(tl.int32), 0)
    low, upper = elias_fano(n, fill)
    listed = tl.where((sparse > 0) & (bits + n > 0), length(fill) + upper + n * low, 0)
    tl.store(sizes + b, (bits + listed + 31) >> 5)


@jit(do_not_specialize=["spans", "blocks", "most"])
def exact_total_kernel(plan, counts, spans, blocks, most, SCAN: tl.constexpr):
    i = tl.arange(0, SCAN)
    moved = tl.zeros([SCAN], tl.int32)
    given = tl.zeros([SCAN], tl.int32)
    tables = spans * 32
    for first in range(0, tables, SCAN):
        inside = first + i < tables
        moved |= tl.load(counts + (first + i) * 32, mask=inside, other=0)
        given += (tl.load(plan + 1 + first + i, mask=inside, other=0) > 0).to(tl.int32)
    entries = tl.sum(given, 0)
    total = 1 + spans + (entries + 3) // 4 + (blocks + 1) // 2
    sizes = plan + 1 + tables
    for first in range(0, blocks, SCAN):
        inside = first + i < blocks
        size = tl.load(sizes + first + i, mask=inside, other=0)
        ends = tl.cumsum(size, 0)
        tl.store(sizes + first + i, total + ends - size, mask=inside)
        total += tl.sum(size, 0)
    total = tl.where(tl.max(moved, 0) > 0, tl.minimum(total, most), 1)
    tl.store(plan, total)


@on_device_of("new")
def measure_exact(new: Tensor, old: Tensor, plan: Tensor, *, layout: ExactLayout) -> None:
    """See :meth:`tagc.ops.exact.ExactOps.measure_exact`."""
    new, old = new.view(torch.int16), old.view(torch.int16)
    spans, blocks, device = len(layout.spans), layout.blocks, new.device
    counts = buffer("exact_counts", (max(1, spans) * _BINS,), torch.int32, device, None)
    table, sizes = plan[:, 1:], plan[:, 1 + layout.tables :]
    where, mantissa = where_of(layout, device), MANTISSA[layout.dtype]
    torch_call(Tensor.zero_, counts)
    if blocks:
        exact_counts_kernel[(cdiv(blocks, _EACH),)](
            new, old, where, counts, blocks, EACH=_EACH, BLOCK=layout.block, MANTISSA=mantissa,
            BINS=_BINS, num_warps=min(4, warps_of(layout.block)),
        )  # fmt: skip
    if spans:
        exact_widths_kernel[(layout.tables,)](counts, table, num_warps=4)
    if blocks:
        exact_sizes_kernel[(blocks,)](
            new, old, where, table, sizes, blocks, BLOCK=layout.block, MANTISSA=mantissa,
            num_warps=warps_of(layout.block),
        )  # fmt: skip
    exact_total_kernel[(1,)](
        plan,
        counts,
        spans,
        blocks,
        layout.words,
        SCAN=_SCAN,
        num_warps=_SCAN_WARPS,
    )
