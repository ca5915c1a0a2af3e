"""Keys: list the groups of the union in ascending order and count them into their cells.

A key's slot is the number of present groups before it: the totals of whole blocks of words, plus
those of the words before its own within the block (from the union), plus the set bits below its
own. Slots do not depend on the order in which programs run.

Worked example: words 0b101, 0b10 have keys 0, 2, 33 in slots 0, 1, 2; offsets are 0 and 2.
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .scalar import bits_of, cell_of, load_words, slot_of
from .table import UNION_BLOCK, Table

_WORDS = 16
_TILES = 8
_WARPS = 4


@jit(do_not_specialize=["words", "partition", "seed"])
def keys_kernel(
    union, offset, blocks, first_slot, keys, values, entry, degree, seed, words, partition,
    WORDS: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, HASHES: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0) * (WORDS * TILES)
    before = tl.zeros([BLOCK], tl.int32)
    b = tl.arange(0, BLOCK)
    for block in range(0, begin // BLOCK, BLOCK):
        before += tl.load(blocks + block + b, mask=block + b < begin // BLOCK, other=0)
    base = tl.sum(before, 0)
    seed_value = tl.load(seed)
    for first in range(begin, tl.minimum(begin + WORDS * TILES, words), WORDS):
        w = first + tl.arange(0, WORDS)
        word = load_words(union + w, w < words)
        start = base + tl.load(offset + w, mask=w < words, other=0)
        tl.store(first_slot + w, start, mask=w < words)
        present = bits_of(word)  # [WORDS, 32]
        slot = slot_of(word, start)
        key = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)
        tl.store(keys + slot, key, mask=present)
        tl.store(values + slot, tl.zeros(slot.shape, values.dtype.element_ty), mask=present)
        for i in tl.static_range(HASHES):
            cell = cell_of(key.to(tl.uint32), seed_value, partition, i)
            if degree is None:
                one = tl.full(slot.shape, 1, tl.int64)
                tl.atomic_add(entry + cell, one, mask=present, sem="relaxed")
            else:
                tl.atomic_add(degree + cell, 1, mask=present, sem="relaxed")


def list_keys(seed: Tensor, table: Table, *, layout: SketchLayout) -> None:
    """Write keys, slots and degrees; values become 0."""
    if layout.groups == 0:
        return
    assert UNION_BLOCK % (_WORDS * _TILES) == 0, "a program's words must lie in one block"
    keys_kernel[(triton.cdiv(layout.words, _WORDS * _TILES),)](
        table.union, table.offset, table.blocks, table.first_slot, table.keys, table.values,
        table.entry, table.degree, seed, layout.words, layout.partition,
        WORDS=_WORDS, TILES=_TILES, BLOCK=UNION_BLOCK, HASHES=layout.hashes,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
