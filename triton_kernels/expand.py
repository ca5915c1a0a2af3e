"""Expand: mark the groups that were not recovered; in a direct layout, write the symbols.

Worked example: if the bitmap 0b0100 of the groups 0, 2, 3 is left, the marks are (0, 0, 1, 0).
"""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv, jit, tl
from .scalar import bits_of, load_words
from .table import Table

_WORDS = 16
_WARPS = 4


@jit(do_not_specialize=["words"])
def expand_kernel(
    marks, cells, symbols, stuck, groups, words, WORDS: tl.constexpr, DIRECT: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * WORDS
    w = tl.arange(0, WORDS)
    marked = bits_of(load_words(marks + first + w, w < words - first))  # [WORDS, 32]
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)
    inside = group < groups - first * 32
    if DIRECT:
        symbol = tl.load(cells + first * 32 + group, mask=marked, other=0)
        tl.store(symbols + first * 32 + group, symbol, mask=inside)
        tl.store(stuck + first * 32 + group, tl.zeros([WORDS, 32], tl.int8), mask=inside)
    else:
        tl.store(stuck + first * 32 + group, marked.to(tl.int8), mask=inside)


def expand(
    cells: Tensor, symbols: Tensor, stuck: Tensor, table: Table, *, layout: SketchLayout
) -> None:
    """Write ``stuck`` (int8) and, if the layout is direct, ``symbols``, both ``[groups]``."""
    if layout.groups == 0:
        return
    expand_kernel[(cdiv(layout.words, _WORDS),)](
        table.open, cells, symbols, stuck, layout.groups, layout.words,
        WORDS=_WORDS, DIRECT=layout.direct, num_warps=_WARPS,
    )  # fmt: skip
