"""Rank: count the set bits of a bitmap before each run of its words.

There are two kernels: one counts per run of ``step`` words and per block of words; in the other,
one program per row adds up the blocks. A run's first slot, the number of set bits before it, is
``starts[block] + offset[run]``. There are no atomics, so it does not depend on the order of
programs. A kernel that needs the slots inside a run counts the run's words, which is cheaper than
to write and read an offset per word.

Worked example (blocks of two words, runs of one): words 0b101, 0b10, 0b1 have the offsets 0, 2, 0,
the blocks' totals 3 and 1 and starts 0 and 3; the row's total is 4.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from .jit import jit, tl
from .scalar import load_bitmap, popcount
from .scratch import buffer
from .sizes import cdiv

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
        offset: ``[R, runs + 1]`` int32, set bits before each run of ``step`` words in its block;
            the last entry is past the last run, and garbage if that run ends a block.
        starts: ``[R, blocks + 1]`` int32, set bits before each block, and all of them.
        total: ``[R]`` int32, set bits.
        step: words of a run.
    """

    offset: Tensor
    starts: Tensor
    total: Tensor
    step: int


@jit(do_not_specialize=_PLAIN)
def rank_kernel(
    bitmap, offset, totals, groups, words, blocks, bitmap_stride,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = BLOCK // STEP
    r = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64)
    run = block * RUNS + tl.arange(0, RUNS)
    w = run[:, None] * STEP + tl.arange(0, STEP)[None, :]
    count = tl.sum(popcount(load_bitmap(bitmap + r * bitmap_stride, w, groups)), 1)  # [RUNS]
    runs = tl.cdiv(words, STEP)
    place = offset + r * (runs + 1) + run
    tl.store(place, tl.cumsum(count, 0) - count, mask=run <= runs)
    tl.store(totals + r * blocks + block, tl.sum(count, 0))


@jit
def run_start(offset, starts, run, RUNS: tl.constexpr):
    """Set bits before a run of words, or, past the last run, all of them.

    Args:
        offset, starts: first element of the row.
        run: scalar.
        RUNS: runs per block.
    """
    return tl.load(starts + run // RUNS) + tl.load(offset + run, mask=run % RUNS != 0, other=0)


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
        place = starts + r * (blocks + 1) + b
        tl.store(place, before + tl.cumsum(count, 0) - count, mask=b < blocks)
        before += tl.sum(count, 0)
    tl.store(starts + r * (blocks + 1) + blocks, before)
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
    step: int = 1,
) -> Ranks:
    """Rank the bits of bitmaps.

    Args:
        bitmap: ``[R, words]`` int32.
        groups: number of valid bits.
        purpose: ranks with the same purpose share buffers.
        layout: the layout whose scratch buffers to use.
        counts, header: ``[R]`` int32, also written with the total.
        step: words of a run; divides the words of a block.
    """
    R, words = bitmap.shape
    assert RANK_BLOCK % step == 0, "a run must lie in one block"
    blocks, runs = cdiv(words, RANK_BLOCK), cdiv(words, step)

    def take(name: str, *shape: int) -> Tensor:
        return buffer(f"{purpose} {name}", shape, torch.int32, bitmap.device, layout)

    ranks = Ranks(offset=take("offset", R, runs + 1), starts=take("starts", R, blocks + 1),
                  total=take("total", R), step=step)  # fmt: skip
    totals = take("totals", R, blocks)
    if blocks:
        rank_kernel[(blocks, R)](
            bitmap, ranks.offset, totals, groups, words, blocks, bitmap.stride(0),
            BLOCK=RANK_BLOCK, STEP=step, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    scan_kernel[(R,)](
        totals, ranks.starts, ranks.total, counts, header, blocks,
        0 if counts is None else counts.stride(0), 0 if header is None else header.stride(0),
        CHUNK=_CHUNK, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return ranks
