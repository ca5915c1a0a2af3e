"""The buffers of one decode: bitmap, peeling table, work lists.

An entry of the table is one 64-bit word that atomic additions change. If one key is left in its
cell, the entry names it. All fields are sums over the remaining keys, so with one key left, the
word is that key's, whatever was carried between fields before. There are two formats:

* *packed*: ``value << 32 | (Σ low 16 bits of hashes) << 16 | degree``. A cell has at most
  ``ceil(2^32 / partition)`` keys (see :mod:`.hashing`). If that is at most 0xFFFE, the degree
  never exceeds its 16 bits, and 16 bits of its hash identify a key.
* *split*: ``(Σ keys) << 32 | degree``, with the value in a separate table. Degrees stay below 2^31,
  like the number of groups.

Worked example (packed): a cell with the value -2 and the hashes 0x12345678 and 0x12348888 has
0xfffffffe_00000000 + 0x5678_0000 + 0x8888_0000 + 2 = 0xfffffffe_df000002.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv
from .scratch import buffer
from .stash import PROGRAMS, STASH, STASH_WORDS

# The most peeling launches that can hand work to the next one.
LISTS = 32
# The most cells in the stash of a peeling program, and cells of the table per program.
ROOM, _CELLS = 256, 128


@dataclass(frozen=True, kw_only=True)
class Table:
    """Device buffers; all except the first are None in a direct layout.

    Attributes:
        open: ``[words + 1]`` int32: a bitmap, first of the union, later of the keys not recovered;
            then the poison word.
        entry: ``[cells]`` int64.
        value: ``[cells]`` int32; None if it is in the entry.
        stash: int32, a piece for every program.
        lists: ``[2, cells]`` int32, cells to peel: one list for this launch, one for the next.
        pending: ``[LISTS]`` int32, number of cells that each launch has to read.
    """

    open: Tensor
    entry: Tensor | None = None
    value: Tensor | None = None
    stash: Tensor | None = None
    lists: Tensor | None = None
    pending: Tensor | None = None


def packed(layout: SketchLayout) -> bool:
    """Whether an entry holds value, hash and degree."""
    return -(-(1 << 32) // layout.partition) <= 0xFFFE


def listing_programs(words: int, rows: int) -> int:
    """Number of programs per row to list the bits of ``rows`` bitmaps of ``words`` words."""
    return min(max(1, PROGRAMS // rows), cdiv(words, STASH_WORDS))


def peeling_programs(layout: SketchLayout) -> int:
    """Number of programs of a peeling launch."""
    return min(PROGRAMS, cdiv(layout.cells, _CELLS))


def table_of(layout: SketchLayout, device: torch.device) -> Table:
    """The buffers for this layout, kept between calls."""

    def take(purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return buffer(purpose, shape, dtype, device, layout)

    marks = take("open", (layout.index_words,), torch.int32)
    if layout.direct:
        return Table(open=marks)
    listing = layout.hashes * listing_programs(layout.words, layout.hashes) * STASH
    peeling = peeling_programs(layout) * ROOM
    return Table(
        open=marks,
        entry=take("entry", (layout.cells,), torch.int64),
        value=None if packed(layout) else take("value", (layout.cells,), torch.int32),
        stash=take("stash", (max(listing, peeling),), torch.int32),
        lists=take("lists", (2, layout.cells), torch.int32),
        pending=take("pending", (LISTS,), torch.int32),
    )
