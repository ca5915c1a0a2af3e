"""Sketches are read: decode, and peeling by itself.

1. OR the ranks' bitmaps, and write the summed cells to the peeling table (:mod:`.table`).
2. In a direct layout, write the elements: ``float32(sum of q) * step / divisor``, 0 in absent
   groups. The step is a power of two, so the product is exact and the division rounds once. If the
   divisor is also a power of two, multiplying by its inverse gives the same bits. If any rank's
   poison word is set, everything is NaN. That is all then.
3. Count the keys of the union into their cells. The grid's first axis divides the words, the second
   the partitions of the table. So programs that run at the same time use one partition, which fits
   the cache even if the table does not. Additions to entries keep the cache busy and the memory
   idle, so the same programs fill the output with zeros, or with NaN if any rank's poison word is
   set.
4. :mod:`.peel` writes the keys that it recovers.
5. Count the other keys, and add estimates of them to the owner's residual: the mean over a key's
   cells of the cell's remaining sum, shared equally among the cell's remaining keys, which is
   ``Σᵢ (left[cᵢ] * step / degree[cᵢ]) / hashes``, in float32, in the order of the partitions. For
   that, a kernel subtracts the hashes of the remaining keys from packed entries, so that an entry
   is value and degree, without carries between them.

Peeling by itself gives symbols, and marks the groups that were not recovered; in a direct layout
the cells are the symbols.

Worked examples. Union (2 ranks, one word each): bitmaps 0b0101 and 0b0110 have the union 0b0111; a
cell -2 becomes the packed entry 0xfffffffe_00000000. Direct (int8x4, step 0.5, divisor 2): symbol
511 has the lanes (-1, 2, 0, 0), which become (-0.25, 0.5, 0, 0). Keys (2 hashes): key 2 with the
hashes 0x11112222 and 0x33334444 adds 0x2222_0001 to one packed entry and 0x4444_0001 to another,
0x2_00000001 to both of split ones. Estimates (2 hashes, step 1): keys 0 and 1, symbols 5 and 7,
share cells 0 and 2, both of which keep (12, 2); each key's estimate is (12 / 2 + 12 / 2) / 2 = 6.
Marks: if the bitmap 0b0100 of the groups 0, 2, 3 is left, the marks are (0, 0, 1, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv, division, jit, on_device_of, tl
from .peel import peel_table
from .scalar import bits_of, lane_sums, load_words, magnitude, narrow_finite, popcount, widen
from .scratch import buffer
from .table import (
    LANES_OF_A_STEP,
    LISTS,
    STASH,
    STASH_WORDS,
    Table,
    cell_at,
    contribution,
    hash_of,
    listing_programs,
    packed,
    pop,
    push_bits,
    table_of,
)

# Entries of a program, and words of bitmaps; words of marks, and those whose keys it processes at
# once; elements that it clears at a time.
_ENTRIES, _WORDS, _MARKS, _AT_ONCE, _FILL = 1024, 16, 1024, 4, 1024
_WARPS = 4


@jit(do_not_specialize=["W", "index_stride", "groups", "words", "length", "numel", "stats"])
def union_kernel(
    index, cells, union, entry, value, pending, stats,
    W, index_stride, groups, words, length, numel,
    BLOCK: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    w = p * BLOCK + tl.arange(0, BLOCK)
    if p * BLOCK < length:
        word = tl.zeros([BLOCK], tl.uint32)
        for _ in range(W):
            word |= load_words(index + w, w < length)
            index += index_stride
        # Ignore bits past the last group; the poison word past the bitmap stays whole.
        tail = (groups % 32).to(tl.uint32)
        cut = (w == words - 1) & (tail != 0)
        word = tl.where(cut, word & ((tl.full([], 1, tl.uint32) << tail) - 1), word)
        tl.store(union + w, word.to(tl.int32, bitcast=True), mask=w < length)
    if p == 0:
        two = tl.arange(0, 2)
        tl.store(stats + two, tl.zeros([2], tl.int32))
    if entry is not None:
        cell = tl.load(cells + w, mask=w < numel, other=0)
        if value is None:
            tl.store(entry + w, cell.to(tl.int64) << 32, mask=w < numel)
        else:
            tl.store(entry + w, tl.zeros([BLOCK], tl.int64), mask=w < numel)
            tl.store(value + w, cell, mask=w < numel)
        if p == 0:
            tl.store(pending + tl.arange(0, LISTS), tl.zeros([LISTS], tl.int32))


@jit(do_not_specialize=["words", "partition", "seed", "stats"])
def keys_kernel(
    union, entry, stash, stats, seed, out, n, words, partition,
    WORDS: tl.constexpr, STASH: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
    PACKED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    programs = tl.num_programs(0)
    turn = (tl.program_id(0) + i * programs).to(tl.int64)
    fill = tl.zeros([FILL], tl.float32)
    if not RAW:
        fill = tl.where(tl.load(union + words) != 0, float("nan"), fill)
    dtype: tl.constexpr = out.dtype.element_ty
    for start in range(turn * FILL, n, programs * tl.num_programs(1) * FILL):
        j = start + tl.arange(0, FILL)
        tl.store(out + j, fill.to(dtype), mask=j < n)

    seed_value = tl.load(seed)
    mine = stash + turn * STASH
    count = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for first in range(tl.program_id(0) * WORDS, words, programs * WORDS):
        before = count
        count = push_bits(mine, count, union, first, words, WORDS)
        total += count - before
        flush = first + programs * WORDS >= words
        while (count >= BLOCK) | (flush & (count > 0)):
            item = pop(mine, count, BLOCK)
            count = tl.maximum(count - BLOCK, 0)
            key = item.to(tl.uint32, bitcast=True)
            h = hash_of(key, seed_value, i)
            more = contribution(key, h, PACKED)
            tl.atomic_add(entry + cell_at(h, partition, i), more, mask=item >= 0, sem="relaxed")
    if (i == 0) & (total > 0):
        tl.atomic_add(stats, total, sem="relaxed")


@jit(do_not_specialize=["words", "divisor", "step", "stats"])
def write_kernel(
    union, cells, step, out, stats, n, words, divisor,
    LANES: tl.constexpr, WORDS: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * WORDS
    w = tl.arange(0, WORDS)
    word = load_words(union + first + w, w < words - first)
    total = tl.sum(popcount(word), 0)
    if total > 0:
        tl.atomic_add(stats, total, sem="relaxed")
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)  # [WORDS, 32]
    value = tl.load(cells + first * 32 + group, mask=bits_of(word), other=0)
    x = lane_sums(value, LANES).to(tl.float32) * tl.load(step)  # [WORDS, 32, LANES]
    x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
    poison = tl.load(union + words) != 0
    x = tl.where(poison, float("nan"), x)
    j = tl.expand_dims(group, 2) * LANES + tl.arange(0, LANES)
    start = first * (32 * LANES)
    tl.store(out + start + j, x.to(out.dtype.element_ty), mask=j < n - start)


@jit(do_not_specialize=["words"])
def expand_kernel(
    marks, cells, symbols, stuck, groups, words, WORDS: tl.constexpr, DIRECT: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * WORDS
    w = tl.arange(0, WORDS)
    marked = bits_of(load_words(marks + first + w, w < words - first))  # [WORDS, 32]
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)
    inside = group < groups - first * 32
    if DIRECT:
        symbol = tl.load(cells + first * 32 + group, mask=marked, other=0)
        tl.store(symbols + first * 32 + group, symbol, mask=inside)
        tl.store(stuck + first * 32 + group, tl.zeros([WORDS, 32], tl.int8), mask=inside)
    else:
        tl.store(stuck + first * 32 + group, marked.to(tl.int8), mask=inside)


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


def _sum_and_peel(
    index: Tensor,
    cells: Tensor,
    step: Tensor,
    seed: Tensor,
    out: Tensor,
    stats: Tensor,
    layout: SketchLayout,
    divisor: int,
    raw: bool,
) -> Table:
    """OR bitmaps ``[W, length]``, with a poison word (``index_words``) or without (``words``). In a
    direct layout that is all; otherwise write what can be recovered to ``out``: elements, or if
    ``raw``, symbols. The bits of other keys stay set in the table."""
    (W, length), table = index.shape, table_of(layout, cells.device)
    entries = 0 if layout.direct else layout.cells
    union_kernel[(max(1, cdiv(max(length, entries), _ENTRIES)),)](
        index, cells, table.open, table.entry, table.value, table.pending, stats,
        W, index.stride(0), layout.groups, layout.words, length, entries,
        BLOCK=_ENTRIES, LISTS=LISTS, num_warps=_WARPS,
    )  # fmt: skip
    if layout.groups and not layout.direct:
        programs = listing_programs(layout.words, layout.hashes)
        keys_kernel[(programs, layout.hashes)](
            table.open, table.entry, table.stash, stats, seed, out, out.shape[0], layout.words,
            layout.partition, WORDS=STASH_WORDS, STASH=STASH, BLOCK=LANES_OF_A_STEP, FILL=_FILL,
            PACKED=packed(layout), RAW=raw, num_warps=1,
        )  # fmt: skip
        peel_table(seed, step, out, table, layout, divisor, raw)
    return table


@on_device_of("cells")
def decode(
    index: Tensor,
    cells: Tensor,
    step: Tensor,
    seed: Tensor,
    out: Tensor,
    residual: Tensor | None,
    stats: Tensor,
    *,
    layout: SketchLayout,
    divisor: int,
) -> None:
    """See :func:`tagc.ops.reference.decode`."""
    table = _sum_and_peel(index, cells, step, seed, out, stats, layout, divisor, raw=False)
    if not layout.groups:
        return
    if layout.direct:
        factor, divide = division(divisor)
        write_kernel[(cdiv(layout.words, _WORDS),)](
            table.open, cells, step, out, stats, layout.numel, layout.words, factor,
            LANES=layout.symbol.lanes, WORDS=_WORDS, DIVIDE=divide, num_warps=_WARPS,
        )  # fmt: skip
        return
    entry, marks, grid = table.entry, table.open, (cdiv(layout.words, _MARKS),)
    sizes = {"BLOCK": _MARKS, "WORDS": _AT_ONCE, "HASHES": layout.hashes, "num_warps": _WARPS}
    if residual is not None and packed(layout):
        clear_kernel[grid](entry, marks, seed, layout.words, layout.partition, **sizes)
    estimate_kernel[grid](
        entry, table.value, marks, stats, seed, step, residual, layout.numel, layout.words,
        layout.partition, LANES=layout.symbol.lanes, **sizes,
    )  # fmt: skip


@on_device_of("cells")
def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """See :func:`tagc.ops.reference.peel`."""
    symbols = torch.empty(layout.groups, dtype=cells.dtype, device=cells.device)
    stuck = torch.empty(layout.groups, dtype=torch.int8, device=cells.device)
    stats = buffer("stats", (2,), torch.int32, cells.device, layout)
    # Symbols stay as they are: neither step nor divisor matters.
    table = _sum_and_peel(index[None], cells, seed, seed, symbols, stats, layout, 1, raw=True)
    if layout.groups:
        expand_kernel[(cdiv(layout.words, _WORDS),)](
            table.open, cells, symbols, stuck, layout.groups, layout.words,
            WORDS=_WORDS, DIRECT=layout.direct, num_warps=_WARPS,
        )  # fmt: skip
    return symbols, stuck.view(torch.bool)
