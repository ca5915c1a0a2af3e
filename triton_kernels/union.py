"""Union: OR the ranks' bitmaps, and write the summed cells to the peeling table.

Entries get their values here; :mod:`.keys` adds keys and degrees.

Worked example (2 ranks, one word each): bitmaps 0b0101 and 0b0110 have the union 0b0111; a cell -2
becomes the packed entry 0xfffffffe_00000000.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv, jit, tl
from .scalar import load_words
from .table import LISTS, Table

_BLOCK = 1024
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


def unite(
    index: Tensor, cells: Tensor, stats: Tensor, table: Table, *, layout: SketchLayout
) -> None:
    """Write union and table; set the pending counts and ``stats`` to 0.

    Args:
        index: ``[W, length]`` int32, bitmaps, with a poison word (``index_words``) or without
            (``words``).
        cells: ``[cells]``, the sums; not needed for a direct layout.
        stats: ``[2]`` int32, written.
    """
    W, length = index.shape
    entries = 0 if layout.direct else layout.cells
    union_kernel[(max(1, cdiv(max(length, entries), _BLOCK)),)](
        index, cells, table.open, table.entry, table.value, table.pending, stats,
        W, index.stride(0), layout.groups, layout.words, length, entries,
        BLOCK=_BLOCK, LISTS=LISTS, num_warps=_WARPS,
    )  # fmt: skip
