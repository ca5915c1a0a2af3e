"""Scatter: add symbols to their cells; insert a dense vector of symbols that a bitmap selects.

Key ``k`` owns cell ``(fmix32(k ^ salt_i) * partition) >> 32`` of partition ``i``, one in each of
``hashes`` partitions, or just cell ``k`` in a direct layout.

Worked example (2 partitions of 4 cells): if key 5 hashes to 0x40000000 and 0xc0000000, its symbol
goes to cells 0x40000000 * 4 >> 32 = 1 and 4 + 3 = 7.

:mod:`.emit` scatters the symbols that it has quantized; :func:`insert` scatters given symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .hashing import cell_at, hash_of
from .jit import jit, tl, torch_call
from .scratch import buffer
from .stash import LANES_OF_A_STEP, STASH, STASH_WORDS, pop, push_bits
from .table import listing_programs


@jit
def scatter(cells, key, symbol, mask, seed, partition, HASHES: tl.constexpr):
    """Add ``symbol`` to the cells of ``key`` (int32); tensors of one shape."""
    if HASHES == 1:
        tl.store(cells + key, symbol, mask=mask)
    else:
        for i in tl.static_range(HASHES):
            cell = cell_at(hash_of(key.to(tl.uint32, bitcast=True), seed, i), partition, i)
            tl.atomic_add(cells + cell, symbol, mask=mask, sem="relaxed")


@jit(do_not_specialize=["groups", "words", "partition", "symbols", "index", "cells", "seed"])
def insert_kernel(
    symbols, index, seed, cells, stash, groups, words, partition,
    WORDS: tl.constexpr, STASH: tl.constexpr, BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    programs = tl.num_programs(0)
    seed_value = tl.load(seed)
    mine = stash + tl.program_id(0) * STASH
    count = tl.zeros([], tl.int32)
    for first in range(tl.program_id(0) * WORDS, words, programs * WORDS):
        count = push_bits(mine, count, index, first, words, WORDS)
        flush = first + programs * WORDS >= words
        while (count >= BLOCK) | (flush & (count > 0)):
            key = pop(mine, count, BLOCK)
            count = tl.maximum(count - BLOCK, 0)
            # Ignore bits past the last group.
            present = (key >= 0) & (key < groups)
            symbol = tl.load(symbols + key, mask=present, other=0)
            scatter(cells, key, symbol, present, seed_value, partition, HASHES)


def insert_symbols(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """Write ``cells``, see :meth:`tagc.ops.sketch.SketchOps.insert`."""
    torch_call(Tensor.zero_, cells)
    if layout.groups == 0:
        return
    programs = listing_programs(layout.words, 1)
    stash = buffer("insert", (programs * STASH,), torch.int32, cells.device, layout)
    insert_kernel[(programs,)](
        symbols, index, seed, cells, stash, layout.groups, layout.words, layout.partition,
        WORDS=STASH_WORDS, STASH=STASH, BLOCK=LANES_OF_A_STEP, HASHES=layout.hashes, num_warps=1,
    )  # fmt: skip
