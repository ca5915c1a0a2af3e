"""Scatter: add symbols to their cells; insert a dense vector of symbols that a bitmap selects.

Key ``k`` owns cell ``(fmix32(k ^ salt_i) * partition) >> 32`` of partition ``i``, one in each of
``hashes`` partitions, or just cell ``k`` in a direct layout.

Worked example (2 partitions of 4 cells): if key 5 hashes to 0x40000000 and 0xc0000000, its symbol
goes to cells 0x40000000 * 4 >> 32 = 1 and 4 + 3 = 7.

:mod:`.emit` scatters what it has just quantized; :func:`.sketch.insert` launches the kernel here.
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import bits_of, cell_of, load_words


@jit
def scatter(cells, key, symbol, mask, seed, partition, HASHES: tl.constexpr):
    """Add ``symbol`` to the cells of ``key`` (uint32); tensors of one shape."""
    if HASHES == 1:
        tl.store(cells + key.to(tl.int64), symbol, mask=mask)
    else:
        for i in tl.static_range(HASHES):
            cell = cell_of(key, seed, partition, i)
            tl.atomic_add(cells + cell, symbol, mask=mask, sem="relaxed")


@jit(do_not_specialize=["groups", "words", "partition", "symbols", "index", "cells", "seed"])
def insert_kernel(
    symbols, index, seed, cells, groups, words, partition,
    WORDS: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * WORDS
    w = tl.arange(0, WORDS)
    word = load_words(index + first + w, w < words - first)
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)  # [WORDS, 32]
    present = bits_of(word) & (group < groups - first * 32)
    symbol = tl.load(symbols + first * 32 + group, mask=present, other=0)
    key = (first * 32).to(tl.uint32) + group.to(tl.uint32)
    scatter(cells, key, symbol, present, tl.load(seed), partition, HASHES)
