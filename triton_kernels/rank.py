"""Rank: how many set bits of a bitmap come before each of its words.

Two kernels: one counts per word and per block of words, and one program per row adds up the
blocks. A bit's slot, its number among the set bits, is ``starts[block] + offset[word]`` plus the
set bits below its own in its word; no atomics, so it does not depend on which program runs first.

Worked example (blocks of two words): words 0b101, 0b10, 0b1 have the offsets 0, 2, 0, the blocks'
totals 3 and 1 and starts 0 and 3; the row's total is 4.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .jit import jit, tl
from .scalar import load_bitmap, popcount
from .scratch import buffer

# Words per block.
RANK_BLOCK = 1024
_WARPS = 4
# Blocks at a time.
_CHUNK = 1024
_PLAIN = ["groups", "words", "blocks", "bitmap_stride", "total", "counts", "header"]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Device buffers.

    Attributes:
        offset: ``[R, words]`` int32, set bits before each word in its block.
        starts: ``[R, blocks]`` int32, set bits before each block.
        total: ``[R]`` int32, set bits.
    """

    offset: Tensor
    starts: Tensor
    total: Tensor


@jit(do_not_specialize=_PLAIN)
def rank_kernel(
    bitmap, offset, totals, groups, words, blocks, bitmap_stride, BLOCK: tl.constexpr
):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    w = block * BLOCK + tl.arange(0, BLOCK)
    count = popcount(load_bitmap(bitmap + r * bitmap_stride, w, groups))
    tl.store(offset + r * words + w, tl.cumsum(count, 0) - count, mask=w < words)
    tl.store(totals + r * blocks + block, tl.sum(count, 0))


@jit(do_not_specialize=[*_PLAIN, "counts_stride", "header_stride"])
def scan_kernel(
    totals, starts, total, counts, header, blocks, counts_stride, header_stride,
    CHUNK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    before = tl.zeros([], tl.int32)
    for first in range(0, blocks, CHUNK):
        b = first + tl.arange(0, CHUNK)
        count = tl.load(totals + r * blocks + b, mask=b < blocks, other=0)
        tl.store(starts + r * blocks + b, before + tl.cumsum(count, 0) - count, mask=b < blocks)
        before += tl.sum(count, 0)
    tl.store(total + r, before)
    if counts is not None:
        tl.store(counts + r * counts_stride, before)
    if header is not None:
        tl.store(header + r * header_stride, before)


def rank(
    bitmap: Tensor,
    groups: int,
    purpose: str,
    *,
    layout: Hashable,
    counts: Tensor | None = None,
    header: Tensor | None = None,
) -> Ranks:
    """Rank the bits of bitmaps.

    Args:
        bitmap: ``[R, words]`` int32.
        groups: bits that mean something.
        purpose: two ranks of the same purpose share buffers.
        layout: whose scratch buffers to use.
        counts, header: ``[R]`` int32, where else to write the total.
    """
    R, words = bitmap.shape
    blocks = triton.cdiv(words, RANK_BLOCK)

    def take(name: str, *shape: int) -> Tensor:
        return buffer(f"{purpose} {name}", shape, torch.int32, bitmap.device, layout)

    ranks = Ranks(offset=take("offset", R, words), starts=take("starts", R, blocks),
                  total=take("total", R))  # fmt: skip
    totals = take("totals", R, blocks)
    if blocks:
        rank_kernel[(blocks, R)](
            bitmap, ranks.offset, totals, groups, words, blocks, bitmap.stride(0),
            BLOCK=RANK_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    scan_kernel[(R,)](
        totals, ranks.starts, ranks.total, counts, header, blocks,
        0 if counts is None else counts.stride(0), 0 if header is None else header.stride(0),
        CHUNK=_CHUNK, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return ranks
