"""What the kernels of exact changes share: numbers of changes, and bits of blocks.

A program has one block, whose elements, span and place in the row are constants of the layout. See
:mod:`tagc.ops.exact` for the format.

Worked example: bfloat16 1.0 has the bits 0x3F80 and the class 127 % 32 = 31. The next larger number
is ``z = 2`` away, and ``z + 1 = 3`` has a length of 2 bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tagc.ops.exact import ExactLayout

from .jit import jit, tl


@cache
def where_of(layout: ExactLayout, device: torch.device) -> Tensor:
    """First element, number of elements and span of each block ``[3, blocks]`` int64. The first
    call for a layout must not be inside the capture of a graph."""
    if device.type == "meta":
        return torch.empty(3, layout.blocks, dtype=torch.int64, device=device)
    found, first = [], 0
    for span, size in enumerate(layout.spans):
        for at in range(0, size, layout.block):
            found.append((first + at, min(layout.block, size - at), span))
        first += size
    rows = torch.tensor(found, dtype=torch.int64, device="cpu").view(-1, 3)
    return rows.T.contiguous().to(device)


def warps_of(block: int) -> int:
    """Warps of a program: 4 elements a thread. With 8, decoding a block's list would need more
    registers than leave room for many programs."""
    return max(1, block // 128)


@jit
def load_patterns(row, j, inside):
    """Bit patterns of elements of a row of int16, from 0 on, as int32."""
    return tl.load(row + j, mask=inside, other=0).to(tl.int32) & 0xFFFF


@jit
def ordered(k):
    """Numbers in order of bit patterns, modulo 2**16, and back."""
    return tl.where(k >= 0x8000, k ^ 0x7FFF, k)


@jit
def change(new, old):
    """``z`` of bit patterns."""
    q = (ordered(new) - ordered(old)) & 0xFFFF
    return tl.where(q < 0x8000, 2 * q, 0x1FFFF - 2 * q)


@jit
def changed(old, z):
    """The new bit pattern."""
    q = tl.where((z & 1) > 0, 0xFFFF - (z >> 1), z >> 1)
    return ordered((ordered(old) + q) & 0xFFFF)


@jit
def length(x):
    """Number of bits of a positive int32 below 2**24."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@jit
def before(x):
    """Sums of all numbers before each."""
    return tl.cumsum(x, 0) - x


@jit
def ones(width):
    """The largest number of so many bits."""
    return (1 << width) - 1


@jit
def elias_fano(n, fill):
    """Lower bits of each of ``n`` places in a block, and the bits of all upper parts."""
    low = length(fill // tl.maximum(n, 1)) - 1
    return low, tl.where(n > 0, n + ((fill - 1) >> low), 0)


@jit
def put(block, at, value, mask):
    """Set bits of a block that were zeros; numbers of at most 30 bits."""
    value = value.to(tl.uint32)
    shift = (at & 31).to(tl.uint32)
    low = (value << shift).to(tl.int32, bitcast=True)
    high = ((value >> 1) >> (31 - shift)).to(tl.int32, bitcast=True)
    word = block + (at >> 5)
    tl.atomic_or(word, low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(word + 1, high, mask=mask & (high != 0), sem="relaxed")


@jit
def get(block, words, at, width, mask):
    """Numbers of at most 16 bits of a block of ``words`` words, after which all bits are zeros;
    int32."""
    word = at >> 5
    shift = (at & 31).to(tl.uint32)
    low = tl.load(block + word, mask=mask & (word < words), other=0).to(tl.uint32, bitcast=True)
    more = mask & (word + 1 < words) & ((at & 31) + width > 32)
    high = tl.load(block + word + 1, mask=more, other=0).to(tl.uint32, bitcast=True)
    value = (low >> shift) | ((high << 1) << (31 - shift))
    return value.to(tl.int32, bitcast=True) & ones(width)
