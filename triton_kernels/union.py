"""Union: OR the ranks' bitmaps, count the keys, put the summed cells into the peeling table.

For integer symbols a table entry is one 64-bit word, ``value << 32 | degree``: the sum of the
symbols left in a cell modulo 2^32 and the number of keys left in it, which one atomic changes and
one load reads together. Values go in here, degrees with the keys. For ``float32`` symbols the two
have tables of their own, and values are float64.

Worked example (2 ranks, one word each): bitmaps 0b0101 and 0b0110 have the union 0b0111, with 3
keys, the first of which has slot 0; a cell -2 becomes 0xfffffffe_00000000.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .scalar import load_words, popcount
from .table import FLAGS, UNION_BLOCK, Table

_WARPS = 4


@jit(do_not_specialize=["W", "index_stride", "groups", "words", "length", "numel", "stats"])
def union_kernel(
    index, cells, union, offset, blocks, entry, degree, flags, stats,
    W, index_stride, groups, words, length, numel,
    BLOCK: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    w = p * BLOCK + tl.arange(0, BLOCK)
    if p * BLOCK < length:
        word = tl.zeros([BLOCK], tl.uint32)
        for _ in range(W):
            word |= load_words(index + w, w < length)
            index += index_stride
        # Bits past the last group mean nothing; the poison word past the bitmap stays whole.
        tail = (groups % 32).to(tl.uint32)
        cut = (w == words - 1) & (tail != 0)
        word = tl.where(cut, word & ((tl.full([], 1, tl.uint32) << tail) - 1), word)
        tl.store(union + w, word.to(tl.int32, bitcast=True), mask=w < length)
        count = tl.where(w < words, popcount(word), 0)
        total = tl.sum(count, 0)
        tl.atomic_add(stats, total, sem="relaxed")
        if offset is not None:
            tl.store(offset + w, tl.cumsum(count, 0) - count, mask=w < words)
            tl.store(blocks + p, total)
    if entry is not None:
        value = tl.load(cells + w, mask=w < numel, other=0)
        if degree is None:
            tl.store(entry + w, value.to(tl.int64) << 32, mask=w < numel)
        else:
            tl.store(entry + w, value.to(tl.float64), mask=w < numel)
            tl.store(degree + w, tl.zeros([BLOCK], tl.int32), mask=w < numel)
        if p == 0:
            r = tl.arange(0, FLAGS)
            tl.store(flags + r, (r == 0).to(tl.int32))


def unite(
    index: Tensor, cells: Tensor, stats: Tensor, table: Table, *, layout: SketchLayout
) -> None:
    """Write union, number of keys and table.

    Args:
        index: ``[W, length]`` int32, bitmaps, with a poison word (``index_words``) or without
            (``words``).
        cells: ``[cells]``, summed; not needed for a direct layout.
        stats: ``[2]`` int32, written: keys in the union, 0.
    """
    stats.zero_()
    W, length = index.shape
    entries = 0 if layout.direct else layout.cells
    programs = triton.cdiv(max(length, entries), UNION_BLOCK)
    if programs == 0:
        return
    union_kernel[(programs,)](
        index, cells, table.union, table.offset, table.blocks, table.entry, table.degree,
        table.flags, stats, W, index.stride(0), layout.groups, layout.words, length, entries,
        BLOCK=UNION_BLOCK, FLAGS=FLAGS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
