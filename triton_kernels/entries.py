"""Entries: decode the codes of a sparse message, in order.

A block that is decoded whole costs one load per word of codes, and a few instructions per code. If
blocks are large and a tile needs a small part of one, entries are decoded one by one.

Worked example (bits 4, blocks of 32, so 4 words of 8 codes): entries 30 to 33 are the codes in
words 2 and 3 of block 0, in lane 7, and in words 0 and 1 of block 1, in lane 0.
"""

from __future__ import annotations

from .codes import code_of, codes_at, scale_of
from .jit import jit, tl
from .scalar import in_order


@jit
def decode_blocks(
    scales, codes, first, blocks, mask, BITS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """``q * s`` of the ``N`` entries from block ``first`` on, 0 past the last block."""
    LANES: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = BLOCK // LANES
    b = tl.arange(0, N // BLOCK)
    there = b < tl.minimum(blocks - first, N).to(tl.int32)
    s = scale_of(tl.load(scales + first + b, mask=there, other=0))
    column = b[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    words = tl.load(codes + first * COLUMNS + column, mask=there[:, None], other=0)
    lanes = ()
    for lane in tl.static_range(LANES):
        lanes += (codes_at(words, mask, lane, BITS) * s[:, None],)
    # [blocks, columns * lanes]; a thread has all lanes of its words
    values = in_order(lanes, LANES)
    values = tl.reshape(values, [N // BLOCK, COLUMNS, LANES])
    return tl.reshape(tl.permute(values, [0, 2, 1]), [N])


@jit
def decode_entries(
    scales, codes, first, entries, BITS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """``q * s`` of the ``N`` entries from ``first`` on, 0 past the last entry."""
    COLUMNS: tl.constexpr = BLOCK * BITS // 32
    k = tl.arange(0, N)
    there = k < tl.minimum(entries - first, N).to(tl.int32)
    block = first // BLOCK
    # Unsigned, so that division by a power of two is a shift.
    e = (first % BLOCK).to(tl.uint32) + k.to(tl.uint32)
    s = scale_of(tl.load(scales + block + e // BLOCK, mask=there, other=0))
    column = e // BLOCK * COLUMNS + e % COLUMNS
    code = tl.load(codes + block * COLUMNS + column, mask=there, other=0)
    return code_of(code, (e % BLOCK // COLUMNS).to(tl.int32), BITS) * s


@jit
def beside_zeros(values, GROUP: tl.constexpr):
    """``[N]`` values with as many zeros before each group, ``[2 * N]``."""
    values = tl.reshape(values, [values.numel // GROUP, GROUP])
    pairs = tl.permute(tl.join(tl.zeros_like(values), values), [0, 2, 1])
    return tl.reshape(pairs, [pairs.numel])
