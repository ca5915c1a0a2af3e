"""Write an index: the Elias-Fano code of the listed groups, see :mod:`tagc.ops.packed`.

Low parts are gathered from the list, word by word. For entry ``i``, an atomic OR sets bit
``(key >> low_bits) + i`` of the high bitmap, which was zeroed before.

Worked example (2 low bits): the keys 3, 9, 10 have the low parts 3, 1, 2, in one word
3 | 1 << 2 | 2 << 4 = 39, and the high parts 0, 2, 2, which set the bits 0, 3 and 4.
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.packed import PackedLayout

from .device import on_device_of
from .jit import jit, tl
from .listing import LIST_WORDS, list_groups
from .rank import Ranks, rank
from .sizes import cdiv

# Entries per program.
_ENTRIES = 1024
_WARPS = 4


@jit(do_not_specialize=["total", "capacity", "low_words", "low_stride", "high", "high_stride"])
def index_kernel(
    keys, total, low, high, capacity, low_words, low_stride, high_stride,
    LOW: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    ENTRIES: tl.constexpr = 32 // LOW
    r = tl.program_id(1).to(tl.int64)
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    entry = tl.arange(0, ENTRIES)
    i = w[:, None] * ENTRIES + entry[None, :]
    listed = i < tl.minimum(tl.load(total + r), capacity)
    key = tl.load(keys + r * capacity + i, mask=listed, other=0)
    part = (key & ((1 << LOW) - 1)).to(tl.uint32) << (entry * LOW).to(tl.uint32)[None, :]
    word = tl.sum(part, 1).to(tl.int32, bitcast=True)
    tl.store(low + r * low_stride + w, word, mask=w < low_words)
    place = (key >> LOW) + i
    bit = tl.full(place.shape, 1, tl.int32) << (place & 31)
    tl.atomic_or(high + r * high_stride + (place >> 5), bit, mask=listed, sem="relaxed")


def encode_index(keys: Tensor, ranks: Ranks, index: Tensor, *, layout: PackedLayout) -> None:
    """Write ``index`` ``[R, index_words]`` from the list of groups."""
    low, high = index[:, : layout.low_words], index[:, layout.low_words :]
    high.zero_()
    if layout.capacity == 0:
        return
    words = _ENTRIES * layout.low_bits // 32
    index_kernel[(cdiv(layout.low_words, words), index.shape[0])](
        keys, ranks.total, low, high, layout.capacity, layout.low_words, low.stride(0),
        high.stride(0),
        LOW=layout.low_bits, WORDS=words, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


@on_device_of("bitmap")
def write_index(bitmap: Tensor, index: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.write_index`."""
    if not layout.low_bits:
        index.copy_(bitmap)
        return
    ranks = rank(bitmap, layout.groups, "bitmap", layout=layout, step=LIST_WORDS)
    keys = list_groups(bitmap, ranks, layout.groups, capacity=layout.capacity, layout=layout)
    encode_index(keys, ranks, index, layout=layout)
