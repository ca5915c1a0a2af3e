"""Expand: recovered symbols from slots to groups, with a mark on the unresolved ones.

Worked example: the present groups 0, 2, 3 with values (5, 0, 7) and keys (-1, 2, -1) become symbols
(5, 0, 0, 7) and marks (0, 0, 1, 0).
"""

from __future__ import annotations

import triton
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import jit, tl
from .scalar import bits_of, load_words, slot_of
from .table import Table

_WORDS = 16
_WARPS = 4


@jit(do_not_specialize=["words"])
def expand_kernel(
    union, first_slot, values, keys, symbols, stuck, groups, words, WORDS: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * WORDS
    w = tl.arange(0, WORDS)
    word = load_words(union + first + w, w < words - first)
    present = bits_of(word)  # [WORDS, 32]
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)
    inside = group < groups - first * 32
    symbols += first * 32
    stuck += first * 32
    if first_slot is None:
        value = tl.load(values + first * 32 + group, mask=present, other=0)
        mark = tl.zeros([WORDS, 32], tl.int8)
    else:
        slot = slot_of(word, tl.load(first_slot + first + w, mask=w < words - first, other=0))
        value = tl.load(values + slot, mask=present, other=0)
        mark = (tl.load(keys + slot, mask=present, other=-1) >= 0).to(tl.int8)
    tl.store(symbols + group, value, mask=inside)
    tl.store(stuck + group, mark, mask=inside)


def expand(
    cells: Tensor, symbols: Tensor, stuck: Tensor, table: Table, *, layout: SketchLayout
) -> None:
    """Write ``symbols`` and ``stuck`` (int8), both ``[groups]``."""
    if layout.groups == 0:
        return
    expand_kernel[(triton.cdiv(layout.words, _WORDS),)](
        table.union, table.first_slot, cells if layout.direct else table.values, table.keys,
        symbols, stuck, layout.groups, layout.words,
        WORDS=_WORDS, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
