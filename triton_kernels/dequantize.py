"""Dequantize: add up messages in the order of the ranks, divide, front to back.

``out[k] = (sum over r of q * s) / divisor`` in float32: products are exact, every addition rounds,
from the first message on, and the division is IEEE. If the divisor is a power of two, multiplying
by its inverse gives the same bits.

Worked example (bits 8, one element, 2 messages): codes 100 and -3 with the scales 0.5 and 2 add up
to 50 - 6 = 44; divided by 3, 14.666667.

A program owns whole blocks, and reads their codes and scales from one message after the other. It
writes 16 bytes at a time if rows of ``out`` are 16-byte aligned and 16 divides ``numel``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tagc.ops.blocks import BlockLayout

from .codes import blocks_and_warps, codes_at, scale_of
from .device import on_device_of
from .jit import jit, tl
from .scalar import widen
from .sizes import cdiv

# Elements of a thread: some neighbours in each of the lanes that share its words.
_EACH = 32
# Messages whose loads are in flight at the same time.
_STEPS = 4
# Arguments whose alignment makes no difference.
_PLAIN = ["R", "blocks", "divisor", "mask", "scales", "scales_stride", "scales_next"]


@jit(do_not_specialize=_PLAIN)
def dequantize_kernel(
    scales, codes, out, n, blocks, R, divisor, mask,
    scales_stride, scales_next, codes_stride, codes_next, out_stride,
    BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
    ADD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // LANES
    k = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    b = tl.arange(0, BLOCKS)
    word = b[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    scales += k * scales_stride + first
    codes += k * codes_stride + first * WORDS
    # From minus zero, the sum is the first product even if that is -0. A thread has all codes of
    # its words, lane by lane.
    minus_zero = tl.full([BLOCKS, WORDS], -0x80000000, tl.int32).to(tl.float32, bitcast=True)
    totals = (minus_zero,) * LANES
    exists = b < blocks - first
    for _ in range(0, R, STEPS):
        for _ in tl.static_range(STEPS):
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
    if layout.blocks == 0:
        return
    K, R, _ = message.shape
    blocks, warps = blocks_and_warps(layout.block, _EACH)
    scales, codes = message.view(torch.int16), message[..., layout.scale_words :]
    divide = divisor & (divisor - 1) != 0
    dequantize_kernel[(cdiv(layout.blocks, blocks), K)](
        scales, codes, out, layout.numel, layout.blocks, R,
        float(divisor) if divide else 1.0 / divisor, (1 << layout.bits) - 1,
        scales.stride(0), scales.stride(1), codes.stride(0), codes.stride(1), out.stride(0),
        BITS=layout.bits, BLOCKS=blocks, BLOCK=layout.block, DIVIDE=divide, ADD=add,
        STEPS=math.gcd(R, _STEPS),
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
