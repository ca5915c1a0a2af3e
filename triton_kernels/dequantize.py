"""Dequantize: add up messages in the order of the ranks, divide, front to back.

``out[k] = (sum over r of q * s) / divisor`` in float32: products are exact, every addition rounds,
from the first message on, and the division is IEEE. If the divisor is a power of two, multiplying
by its inverse gives the same bits.

Worked example (bits 8, one element, 2 messages): codes 100 and -3 with the scales 0.5 and 2 add up
to 50 - 6 = 44; divided by 3, 14.666667.

A program owns whole blocks, and reads their codes and scales from one message after the other. It
writes 16 bytes at a time if rows of ``out`` are 16-byte aligned and 16 divides ``numel``. After a
row's blocks come programs for its uncompressed pieces, if there are any; see :mod:`.dense`. Then
all compare the stamps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout

from .codes import blocks_and_warps, codes_at, scale_of
from .dense import is_spoilt, sum_part
from .jit import cdiv, division, jit, on_device_of, tl
from .scalar import widen

# Messages whose loads are in flight at the same time.
STEPS = 4
# Arguments whose alignment makes no difference.
_PLAIN = [
    "R", "blocks", "divisor", "mask", "scales", "scales_stride", "scales_next", "stamp", "wrong",
    "table", "pieces", "tiles", "columns",
]  # fmt: skip


@jit(do_not_specialize=_PLAIN)
def dequantize_kernel(
    scales, codes, out, n, blocks, R, divisor, mask,
    scales_stride, scales_next, codes_stride, codes_next, out_stride,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
    ADD: tl.constexpr, AT_ONCE: tl.constexpr,
    rows=None, elements=None, stamps=None, stamp=None, wrong=None, table=None, pieces=None,
    tiles=None, columns=None, rows_stride=None, elements_stride=None, elements_next=None,
    stamps_next=None,
    UNIT: tl.constexpr = 1, OF_WORDS: tl.constexpr = 1, ONE: tl.constexpr = False,
    TILE: tl.constexpr = 1, STEPS: tl.constexpr = 1, STAMPS: tl.constexpr = 1,
):  # fmt: skip
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // LANES
    k = tl.program_id(1).to(tl.int64)
    spoilt = None
    if wrong is not None:
        spoilt = is_spoilt(stamps, stamp, wrong, R, stamps_next, STAMPS)
    if rows is not None:
        part = tl.program_id(0) - tl.cdiv(blocks, BLOCKS)
        if part >= 0:
            sum_part(
                part, k, spoilt, rows, elements, stamp, wrong, table, pieces, tiles, columns, R,
                divisor, rows_stride, elements_stride, elements_next, UNIT, OF_WORDS, ONE, DIVIDE,
                TILE, STEPS,
            )  # fmt: skip
            return
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    b = tl.arange(0, BLOCKS)
    word = b[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    scales += k * scales_stride + first
    codes += k * codes_stride + first * WORDS
    # From minus zero, the sum is the first product even if that is -0. A thread has all codes of
    # its words, lane by lane.
    begin = tl.full([BLOCKS, WORDS], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    if spoilt is not None:
        begin = tl.where(spoilt, float("nan"), begin)
    totals = (begin,) * LANES
    exists = b < blocks - first
    for _ in range(0, R, AT_ONCE):
        for _ in tl.static_range(AT_ONCE):
            s = scale_of(tl.load(scales + b, mask=exists, other=0))
            w = tl.load(codes + word, mask=exists[:, None], other=0)
            s = tl.broadcast_to(s[:, None], w.shape)
            added = ()
            for lane in tl.static_range(LANES):
                # The product is exact, so fma rounds once, like the addition.
                added += (tl.fma(codes_at(w, mask, lane, BITS), s, totals[lane]),)
            totals = added
            scales += scales_next
            codes += codes_next
    start = first * BLOCK
    out += k * out_stride + start
    for lane in tl.static_range(LANES):
        x = totals[lane]
        x = tl.div_rn(x, tl.zeros_like(x) + divisor) if DIVIDE else x * divisor
        j = b[:, None] * BLOCK + lane * WORDS + tl.arange(0, WORDS)[None, :]
        if ADD:
            x += widen(tl.load(out + j, mask=j < n - start))
        tl.store(out + j, x.to(out.dtype.element_ty), mask=j < n - start)


@on_device_of("out")
def dequantize(
    message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int, add: bool = False
) -> None:
    """See :meth:`tagc.ops.blocks.BlockOps.dequantize`."""
    if layout.blocks:
        sum_blocks(message, out, layout, divisor, add)


def sum_blocks(
    message: Tensor,
    out: Tensor,
    layout: BlockLayout,
    divisor: int,
    add: bool,
    more: int = 0,
    **pieces: Any,
) -> None:
    """Launch blocks, and ``more`` programs for the pieces of each row."""
    K, R, _ = message.shape
    blocks, warps = blocks_and_warps(layout.block)
    scales, codes = message.view(torch.int16), message[..., layout.scale_words :]
    factor, divide = division(divisor)
    dequantize_kernel[(cdiv(layout.blocks, blocks) + more, K)](
        scales, codes, out, layout.numel, layout.blocks, R, factor, (1 << layout.bits) - 1,
        scales.stride(0), scales.stride(1), codes.stride(0), codes.stride(1), out.stride(0),
        BITS=layout.bits, BLOCKS=blocks, BLOCK=layout.block, DIVIDE=divide, ADD=add,
        AT_ONCE=math.gcd(R, STEPS), **pieces, num_warps=warps,
    )  # fmt: skip
