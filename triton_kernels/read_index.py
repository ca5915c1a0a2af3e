"""Read an index: write the bitmap of an Elias-Fano code, see :mod:`tagc.ops.packed`.

Set bit ``p`` of the high bitmap, number ``i`` among the set bits, stands for the group
``(p - i) << low_bits | low part i``. An atomic OR sets the group's bit in the bitmap, which was
zeroed before. A thread owns a word of the high bitmap and goes through all its bits, set or not;
this takes fewer instructions than to find the next set bit as often as the fullest word has one.
With 1 or 2 low bits, the groups of 8 bits lie within 32, and are set together.

Worked example (2 low bits): the high bits 0, 3, 4 less their numbers 0, 1, 2 are the high parts
0, 2, 2; with the low parts 3, 1, 2 the groups are 3, 9, 10.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.packed import PackedLayout

from .device import on_device_of
from .jit import jit, tl
from .rank import RANK_BLOCK, rank, run_start
from .scalar import load_bitmap, popcount
from .sizes import cdiv

# Words per program, four per thread.
_WORDS = 512
_WARPS = 4
_PLAIN = [
    *("starts", "words", "high_words", "low_words", "blocks"),
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
def marks_of(bits, window, LOW: tl.constexpr):
    """Marks of the groups of 8 bits of the high bitmap, starting at the first bit's high part.

    Args:
        bits: uint32, from bit 0 on.
        window: uint32, low parts of the set bits, from bit 0 on.

    Returns:
        The marks, uint32; the number of groups by which the set bits lower the start of the next 8
        bits, uint32; the window after their low parts.
    """
    MOST: tl.constexpr = 7 << LOW
    marks = tl.zeros_like(bits)
    behind = marks + MOST
    # A step moves the earlier marks by one high part.
    for j in tl.static_range(8):
        one = (bits >> j) & 1
        marks = (marks >> (1 << LOW)) + (one << (behind + (window & ((1 << LOW) - 1))))
        window = window >> (one * LOW)
        behind -= one << LOW
    return marks, MOST - behind, window


@jit
def set_marks(bitmap, words, marks, start):
    """Set 32 marks from bit ``start`` of a bitmap on, uint32 tensors."""
    both = marks.to(tl.uint64) << (start & 31).to(tl.uint64)
    lower, upper = both.to(tl.int32), (both >> 32).to(tl.int32)
    w = (start >> 5).to(tl.int32)
    # No group is beyond the last word, unless the message is damaged.
    tl.atomic_or(bitmap + w, lower, mask=(lower != 0) & (w < words), sem="relaxed")
    tl.atomic_or(bitmap + w + 1, upper, mask=(upper != 0) & (w < words - 1), sem="relaxed")


@jit(do_not_specialize=_PLAIN)
def read_kernel(
    low, high, offset, starts, bitmap, words, high_words, low_words, blocks,
    index_stride, bitmap_stride, LOW: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Bits at a time; their low parts fit a word.
    STEPS: tl.constexpr = 32 // LOW
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
    # The high part of the first bit, shifted up; one less after every set bit.
    start = ((w * 32 - i) << LOW).to(tl.uint32, bitcast=True)
    for k in tl.static_range(0, 32, STEPS):
        i = w * 32 + k - (start.to(tl.int32, bitcast=True) >> LOW)
        window = load_window(low, i.to(tl.uint32, bitcast=True) * LOW, low_words)
        bits = word >> k
        if LOW <= 2:
            for j in tl.static_range(0, STEPS, 8):
                marks, ahead, window = marks_of(bits >> j, window, LOW)
                set_marks(bitmap, words, marks, start)
                start += (8 << LOW) - ahead
        else:
            for j in tl.static_range(STEPS):
                one = (bits >> j) & 1
                group = start + (window & ((1 << LOW) - 1))
                place = (group >> 5).to(tl.int32)
                bit = (one << (group & 31)).to(tl.int32, bitcast=True)
                # No group is beyond the last word, unless the message is damaged.
                ours = (one != 0) & (place < words)
                tl.atomic_or(bitmap + place, bit, mask=ours, sem="relaxed")
                start += (1 << LOW) - (one << LOW)
                window = window >> (one * LOW)


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
    read_kernel[(cdiv(layout.high_words, _WORDS), index.shape[0])](
        low, high, ranks.offset, ranks.starts, bitmap, layout.bitmap_words, layout.high_words,
        layout.low_words, cdiv(layout.high_words, RANK_BLOCK), index.stride(0),
        bitmap.stride(0),
        LOW=layout.low_bits, WORDS=_WORDS, BLOCK=RANK_BLOCK, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
