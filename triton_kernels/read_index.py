"""Read an index: the bitmap of an Elias-Fano code, see :mod:`tagc.ops.packed`.

A set bit ``p`` of the high bitmap whose number among the set bits is ``i`` stands for the group
``(p - i) << low_bits | low part i``, whose bit an atomic OR sets in the bitmap, zeroed before. A
thread owns a word of the high bitmap and takes its lowest set bit until none is left.

Worked example (2 low bits): the high bits 0, 3, 4 less their numbers 0, 1, 2 are the high parts
0, 2, 2; with the low parts 3, 1, 2 the groups are 3, 9, 10.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.packed import PackedLayout

from .device import on_device_of
from .jit import jit, tl
from .rank import RANK_BLOCK, rank, run_start
from .scalar import load_bitmap, lowest_bit, popcount

# Words per program, one per thread.
_WORDS = 128
_WARPS = 4
_PLAIN = [
    *("starts", "groups", "high_words", "blocks", "capacity"),
    *("low", "high", "bitmap", "index_stride", "bitmap_stride"),
]


@jit(do_not_specialize=_PLAIN)
def read_kernel(
    low, high, offset, starts, bitmap, groups, high_words, blocks, capacity,
    index_stride, bitmap_stride, LOW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    run = tl.program_id(0)
    w = run * WORDS + tl.arange(0, WORDS)
    word = load_bitmap(high + r * index_stride, w, high_words.to(tl.int64) * 32)
    count = popcount(word)
    runs = tl.cdiv(high_words, WORDS)
    first = run_start(offset + r * (runs + 1), starts + r * (blocks + 1), run, BLOCK // WORDS)
    i = first + tl.cumsum(count, 0) - count
    low += r * index_stride
    bitmap += r * bitmap_stride
    for _ in range(tl.max(count, 0)):
        there = (word != 0) & (i < capacity)
        at = i.to(tl.uint32) * LOW
        part = tl.load(low + (at >> 5), mask=there, other=0)
        part = (part.to(tl.uint32, bitcast=True) >> (at & 31)) & ((1 << LOW) - 1)
        group = ((w * 32 + lowest_bit(word) - i) << LOW).to(tl.uint32, bitcast=True) | part
        # No group is beyond the last, unless the message is damaged.
        there = there & (group < groups)
        bit = tl.full(group.shape, 1, tl.uint32) << (group & 31)
        place = bitmap + (group >> 5)
        tl.atomic_or(place, bit.to(tl.int32, bitcast=True), mask=there, sem="relaxed")
        word &= word - 1
        i += 1


@on_device_of("index")
def read_index(index: Tensor, bitmap: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.read_index`."""
    if not layout.low_bits:
        bitmap.copy_(index)
        return
    bitmap.zero_()
    if layout.capacity == 0:
        return
    low, high = index[:, : layout.low_words], index[:, layout.low_words :]
    ranks = rank(high, 32 * layout.high_words, "high", layout=layout, step=_WORDS)
    read_kernel[(triton.cdiv(layout.high_words, _WORDS), index.shape[0])](
        low, high, ranks.offset, ranks.starts, bitmap, layout.groups, layout.high_words,
        triton.cdiv(layout.high_words, RANK_BLOCK), layout.capacity,
        index.stride(0), bitmap.stride(0),
        LOW=layout.low_bits, WORDS=_WORDS, BLOCK=RANK_BLOCK, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
