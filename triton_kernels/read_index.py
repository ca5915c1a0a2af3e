"""Read an index: the bitmap of an Elias-Fano code, see :mod:`tagc.ops.packed`.

A set bit ``p`` of the high bitmap whose number among the set bits is ``i`` stands for the group
``(p - i) << low_bits | low part i``, whose bit an atomic OR sets in the bitmap, zeroed before.

Worked example (2 low bits): the high bits 0, 3, 4 less their numbers 0, 1, 2 are the high parts
0, 2, 2; with the low parts 3, 1, 2 the groups are 3, 9, 10.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.packed import PackedLayout

from .device import on_device_of
from .jit import jit, tl
from .rank import RANK_BLOCK, rank
from .scalar import bits_of, load_bitmap, slot_of

_WORDS = 32
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
    first = tl.program_id(0) * WORDS
    w = first + tl.arange(0, WORDS)
    word = load_bitmap(high + r * index_stride, w, high_words.to(tl.int64) * 32)
    start = tl.load(starts + r * blocks + first // BLOCK)
    start += tl.load(offset + r * high_words + w, mask=w < high_words, other=0)
    i = slot_of(word, start)
    there = bits_of(word) & (i < capacity)
    place = w[:, None] * 32 + tl.arange(0, 32)[None, :]
    part = tl.load(low + r * index_stride + ((i * LOW) >> 5), mask=there, other=0)
    part = (part >> ((i * LOW) & 31)) & ((1 << LOW) - 1)
    group = ((place - i) << LOW) | part
    # No group is beyond the last, unless the message is damaged.
    there = there & (group >= 0) & (group < groups)
    bit = tl.full(group.shape, 1, tl.int32) << (group & 31)
    tl.atomic_or(bitmap + r * bitmap_stride + (group >> 5), bit, mask=there, sem="relaxed")


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
    ranks = rank(high, 32 * layout.high_words, "high", layout=layout)
    read_kernel[(triton.cdiv(layout.high_words, _WORDS), index.shape[0])](
        low, high, ranks.offset, ranks.starts, bitmap, layout.groups, layout.high_words,
        ranks.starts.shape[1], layout.capacity, index.stride(0), bitmap.stride(0),
        LOW=layout.low_bits, WORDS=_WORDS, BLOCK=RANK_BLOCK, num_warps=_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
