"""Read an index: the bitmap of an Elias-Fano code, see :mod:`tagc.ops.packed`.

A set bit ``p`` of the high bitmap whose number among the set bits is ``i`` stands for the group
``(p - i) << low_bits | low part i``, whose bit an atomic OR sets in the bitmap, zeroed before. A
thread owns a word of the high bitmap and goes through all its bits, set or not: that is fewer
instructions than to look for the next set one as often as the fullest of the words has some. With
1 or 2 low bits, the groups of 8 bits lie in 32, and are set together.

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
from .scalar import load_bitmap, popcount

# Words per program, two per thread.
_WORDS = 256
_WARPS = 4
_PLAIN = [
    *("starts", "groups", "high_words", "low_words", "blocks"),
    *("low", "high", "bitmap", "index_stride", "bitmap_stride"),
]


@jit
def load_window(low, at, words):
    """32 bits from bit ``at`` of ``words`` int32 words on, uint32; garbage past the last word."""
    w = (at >> 5).to(tl.int32)
    first = tl.load(low + tl.minimum(w, words - 1)).to(tl.uint32, bitcast=True)
    second = tl.load(low + tl.minimum(w + 1, words - 1)).to(tl.uint32, bitcast=True)
    both = (second.to(tl.uint64) << 32) | first.to(tl.uint64)
    return (both >> (at & 31).to(tl.uint64)).to(tl.uint32)


@jit
def marks_of(bits, window, LOW: tl.constexpr, STEPS: tl.constexpr):
    """Marks of the groups of ``STEPS`` bits of the high bitmap, from the high part of the first on.

    Args:
        bits: uint32, from bit 0 on.
        window: uint32, low parts of those that are set, from bit 0 on.

    Returns:
        the marks, uint32, and by how many groups the set bits have come forward, uint32.
    """
    MOST: tl.constexpr = (STEPS - 1) << LOW
    marks = tl.zeros_like(bits)
    behind = marks + MOST
    # A step moves the marks of those before by one high part.
    for j in tl.static_range(STEPS):
        one = (bits >> j) & 1
        marks = (marks >> (1 << LOW)) + (one << (behind + (window & ((1 << LOW) - 1))))
        window = window >> (one * LOW)
        behind -= one << LOW
    return marks, MOST - behind


@jit(do_not_specialize=_PLAIN)
def read_kernel(
    low, high, offset, starts, bitmap, groups, high_words, low_words, blocks,
    index_stride, bitmap_stride, LOW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Bits at a time: the low parts of so many fit a word.
    STEPS: tl.constexpr = 32 // LOW if LOW > 4 else 8
    MASK: tl.constexpr = (1 << LOW) - 1
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
    limit = groups.to(tl.uint32, bitcast=True)
    # The high part of the first bit, moved up; one less after every set bit.
    high_part = ((w * 32 - i) << LOW).to(tl.uint32, bitcast=True)
    for part in tl.static_range(32 // STEPS):
        i = w * 32 - (high_part.to(tl.int32, bitcast=True) >> LOW)
        window = load_window(low, i.to(tl.uint32, bitcast=True) * LOW, low_words)
        bits = word >> (part * STEPS)
        start = high_part + (part * STEPS << LOW)
        if LOW <= 2:
            marks, ahead = marks_of(bits, window, LOW, STEPS)
            high_part -= ahead
            # No group is beyond the last, unless the message is damaged.
            room = tl.minimum(limit - tl.minimum(start, limit), 32).to(tl.uint64)
            marks &= ((tl.full(room.shape, 1, tl.uint64) << room) - 1).to(tl.uint32)
            both = marks.to(tl.uint64) << (start & 31).to(tl.uint64)
            place = bitmap + (start >> 5)
            first, second = both.to(tl.uint32), (both >> 32).to(tl.uint32)
            tl.atomic_or(place, first.to(tl.int32, bitcast=True), mask=first != 0, sem="relaxed")
            place += 1
            tl.atomic_or(place, second.to(tl.int32, bitcast=True), mask=second != 0, sem="relaxed")
        else:
            for j in tl.static_range(STEPS):
                marked = ((bits >> j) & 1) != 0
                group = start + (j << LOW) + (window & MASK)
                bit = tl.full(group.shape, 1, tl.uint32) << (group & 31)
                tl.atomic_or(
                    bitmap + (group >> 5), bit.to(tl.int32, bitcast=True),
                    mask=marked & (group < limit), sem="relaxed",
                )  # fmt: skip
                start = tl.where(marked, start - (1 << LOW), start)
                window = tl.where(marked, window >> LOW, window)
            high_part = start - (part * STEPS << LOW)


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
        layout.low_words, triton.cdiv(layout.high_words, RANK_BLOCK), index.stride(0),
        bitmap.stride(0),
        LOW=layout.low_bits, WORDS=_WORDS, BLOCK=RANK_BLOCK, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
