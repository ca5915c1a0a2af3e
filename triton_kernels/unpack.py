"""Unpack: add up the sparse messages of all ranks in their order, divide, front to back.

Per element ``total / divisor``, where ``total`` starts from 0 and takes ``q * s`` from every
message that has the element's group, in the order of the messages, all in float32; where the
divisor is a power of two, multiplying by its inverse gives the same bits. The element's place in a
message's values comes from the rank of its group's bit. If any poison word is set, all is NaN.

Worked example (groups of 2, two messages, divisor 2): group 3 is the second group of the first
message, which has the entries 2 and 3 for it, say 0.5 and -1, and the first of the second, with
the entries 0 and 1, say 1 and 1: elements 6 and 7 become 0.75 and 0.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tagc.ops.packed import POISON, PackedLayout, index_of, values_of

from .codes import code_of, scale_of
from .device import on_device_of
from .jit import jit, tl
from .rank import RANK_BLOCK, rank
from .read_index import read_index
from .scalar import bits_of, load_bitmap, narrow, slot_of
from .scratch import buffer

# Elements per program.
_TILE = 1024
_WARPS = 4
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("poison", "starts", "scales", "codes", "R", "groups", "words", "capacity"),
    *("divisor", "poison_stride", "bitmap_stride", "scales_stride", "codes_stride"),
    *("offset_stride", "starts_stride"),
]


@jit(do_not_specialize=_PLAIN)
def unpack_kernel(
    poison, bitmap, offset, starts, scales, codes, out, n, R, groups, words, capacity, divisor,
    poison_stride, bitmap_stride, offset_stride, starts_stride, scales_stride, codes_stride,
    GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    RANK_BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = BLOCK // GROUP  # groups of a block
    COLUMNS: tl.constexpr = BLOCK * BITS // 32
    first = tl.program_id(0) * WORDS
    w = first + tl.arange(0, WORDS)
    lane = tl.arange(0, GROUP).to(tl.uint32)[None, None, :]
    offset += w
    starts += first // RANK_BLOCK
    total = tl.zeros([WORDS, 32, GROUP], tl.float32)
    poisoned = tl.zeros([], tl.int32)
    for _ in range(R):
        poisoned |= tl.load(poison)
        word = load_bitmap(bitmap, w, groups)
        start = tl.load(starts) + tl.load(offset, mask=w < words, other=0)
        slot = slot_of(word, start).to(tl.uint32)  # [WORDS, 32]
        there = (bits_of(word) & (slot < capacity))[:, :, None]
        block = (slot // SLOTS).to(tl.int64)[:, :, None]
        e = ((slot % SLOTS) * GROUP)[:, :, None] + lane
        s = scale_of(tl.load(scales + block, mask=there, other=0))
        code = tl.load(codes + block * COLUMNS + e % COLUMNS, mask=there, other=0)
        total += tl.where(there, code_of(code, (e // COLUMNS).to(tl.int32), BITS) * s, 0.0)
        poison += poison_stride
        bitmap += bitmap_stride
        offset += offset_stride
        starts += starts_stride
        scales += scales_stride
        codes += codes_stride
    total = tl.div_rn(total, tl.zeros_like(total) + divisor) if DIVIDE else total * divisor
    total = tl.where(poisoned != 0, float("nan"), total)
    start = first.to(tl.int64) * (32 * GROUP)
    j = tl.arange(0, WORDS * 32 * GROUP)
    x = narrow(tl.reshape(total, j.shape), out.dtype.element_ty)
    tl.store(out + start + j, x, mask=j < n - start)


@on_device_of("out")
def unpack(
    message: Tensor,
    support: Tensor | None,
    out: Tensor,
    *,
    layout: PackedLayout,
    divisor: int,
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.unpack`."""
    if layout.numel == 0:
        return
    R, values = message.shape[0], layout.values
    index = index_of(message, layout)
    if support is not None:
        bitmap = support[None]
    elif layout.low_bits:
        bitmap = buffer("received", (R, layout.bitmap_words), torch.int32, out.device, layout)
        read_index(index, bitmap, layout=layout)
    else:
        bitmap = index
    ranks = rank(bitmap, layout.groups, "bitmap", layout=layout)
    # The support's marks and their ranks are the same for every message.
    bitmap, offset, starts = (x.expand(R, -1) for x in (bitmap, ranks.offset, ranks.starts))
    received = values_of(message, layout)
    scales, codes = received.view(torch.int16), received[:, values.scale_words :]
    words = _TILE // (32 * layout.group)
    divide = divisor & (divisor - 1) != 0
    unpack_kernel[(triton.cdiv(layout.bitmap_words, words),)](
        message[:, POISON], bitmap, offset, starts, scales, codes, out, layout.numel, R,
        layout.groups, layout.bitmap_words, layout.capacity,
        float(divisor) if divide else 1.0 / divisor,
        message.stride(0), bitmap.stride(0), offset.stride(0), starts.stride(0),
        scales.stride(0), codes.stride(0),
        GROUP=layout.group, BITS=values.bits, BLOCK=values.block, WORDS=words,
        RANK_BLOCK=RANK_BLOCK, DIVIDE=divide, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
