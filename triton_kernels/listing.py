"""Listing: the groups that a bitmap marks, in ascending order.

Worked example: the words 0b101, 0b10 list the groups 0, 2, 33.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
from torch import Tensor

from .jit import jit, tl
from .rank import RANK_BLOCK, Ranks
from .scalar import bits_of, load_bitmap, slot_of
from .scratch import buffer

_WORDS = 32
_WARPS = 4


@jit(do_not_specialize=["groups", "words", "blocks", "capacity", "bitmap_stride", "starts"])
def list_kernel(
    bitmap, offset, starts, keys, groups, words, blocks, capacity, bitmap_stride,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * WORDS
    w = first + tl.arange(0, WORDS)
    word = load_bitmap(bitmap + r * bitmap_stride, w, groups)
    start = tl.load(starts + r * blocks + first // BLOCK)
    start += tl.load(offset + r * words + w, mask=w < words, other=0)
    slot = slot_of(word, start)
    key = w[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(keys + r * capacity + slot, key, mask=bits_of(word) & (slot < capacity))


def list_groups(
    bitmap: Tensor, ranks: Ranks, groups: int, *, capacity: int, layout: Hashable
) -> Tensor:
    """Keys ``[R, capacity]`` int32, in a scratch buffer; what follows the last one is garbage."""
    R, words = bitmap.shape
    assert RANK_BLOCK % _WORDS == 0, "a program's words must lie in one block"
    keys = buffer("keys", (R, capacity), torch.int32, bitmap.device, layout)
    if capacity:
        list_kernel[(triton.cdiv(words, _WORDS), R)](
            bitmap, ranks.offset, ranks.starts, keys, groups, words, ranks.starts.shape[1],
            capacity, bitmap.stride(0),
            WORDS=_WORDS, BLOCK=RANK_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return keys
