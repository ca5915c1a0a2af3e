"""Listing: list the groups that a bitmap marks, in ascending order.

A thread owns a word and takes its lowest set bit until none is left. So a pass takes as many turns
as the fullest word of a program has set bits, not 32.

Worked example: the words 0b101, 0b10 list the groups 0, 2, 33, in two turns: 0 and 33, then 2.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from .jit import jit, tl
from .rank import RANK_BLOCK, Ranks, run_start
from .scalar import load_bitmap, lowest_bit, popcount
from .scratch import buffer
from .sizes import cdiv

# Words per program, one per thread.
LIST_WORDS = 128
_WARPS = 4


@jit(do_not_specialize=["groups", "words", "blocks", "capacity", "bitmap_stride", "starts"])
def list_kernel(
    bitmap, offset, starts, keys, groups, words, blocks, capacity, bitmap_stride,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    run = tl.program_id(0)
    w = run * WORDS + tl.arange(0, WORDS)
    word = load_bitmap(bitmap + r * bitmap_stride, w, groups)
    count = popcount(word)
    runs = tl.cdiv(words, WORDS)
    first = run_start(offset + r * (runs + 1), starts + r * (blocks + 1), run, BLOCK // WORDS)
    slot = first + tl.cumsum(count, 0) - count
    row = keys + r * capacity
    for _ in range(tl.max(count, 0)):
        tl.store(row + slot, w * 32 + lowest_bit(word), mask=(word != 0) & (slot < capacity))
        word &= word - 1
        slot += 1


def list_groups(
    bitmap: Tensor, ranks: Ranks, groups: int, *, capacity: int, layout: Hashable
) -> Tensor:
    """Keys ``[R, capacity]`` int32, in a scratch buffer, with garbage after the last key.

    Args:
        ranks: ranks of the bitmap, in runs of ``LIST_WORDS``.
    """
    R, words = bitmap.shape
    assert ranks.step == LIST_WORDS, "a program's words must be a run"
    keys = buffer("keys", (R, capacity), torch.int32, bitmap.device, layout)
    if capacity:
        list_kernel[(cdiv(words, LIST_WORDS), R)](
            bitmap, ranks.offset, ranks.starts, keys, groups, words, cdiv(words, RANK_BLOCK),
            capacity, bitmap.stride(0),
            WORDS=LIST_WORDS, BLOCK=RANK_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return keys
