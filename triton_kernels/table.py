"""The peeling table, its buffers, and work lists.

**Cells.** Key ``k`` owns cell ``fmix32(k ^ salt_i) * partition >> 32`` of partition ``i``.
``fmix32`` is a bijection, so the keys of a cell have different hashes, which lie in one interval of
at most ``ceil(2^32 / partition)`` numbers. The low bits of a hash distinguish the numbers of that
interval, so cell and low bits give the hash, and the hash gives the key. Worked example (partition
2^20): the hashes of cell 3 are 0x3000 to 0x3fff, so the low 16 bits 0x3abc mean the hash 0x3abc.

**Entries.** An entry of the table is one 64-bit word that atomic additions change. If one key is
left in its cell, the entry names it. All fields are sums over the remaining keys, so with one key
left, the word is that key's, whatever was carried between fields before. There are two formats:

* *packed*: ``value << 32 | (Σ low 16 bits of hashes) << 16 | degree``. If a cell has at most 0xFFFE
  keys, the degree never exceeds its 16 bits, and 16 bits of its hash identify a key.
* *split*: ``(Σ keys) << 32 | degree``, with the value in a separate table. Degrees stay below 2^31,
  like the number of groups.

Worked example (packed): a cell with the value -2 and the hashes 0x12345678 and 0x12348888 has
0xfffffffe_00000000 + 0x5678_0000 + 0x8888_0000 + 2 = 0xfffffffe_df000002.

**Stashes.** A program of one warp finds work (set bits, cells with one key) at only a few of the
places where it looks. It pushes the work on its stash, a piece of global memory of its own, and
pops a whole warp of it at a time, so that no lane is idle. Worked example (4 lanes): the words
0b101, 0, 0b10, 0 push the groups 0, 2 and 65; one more is enough for a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .jit import cdiv, jit, tl
from .scalar import fmix32, load_words, popcount
from .scratch import buffer

# Lanes of a step. A program is one warp, in which a barrier costs almost nothing.
LANES_OF_A_STEP = 32
# Words processed between two steps, and the size that a stash then needs.
STASH_WORDS = 32
STASH = 32 * STASH_WORDS + LANES_OF_A_STEP
# More programs than a GPU runs at a time gain nothing, and would take more memory.
PROGRAMS = 4096


@jit
def push(stash, count, item, mask):
    """Push ``item`` where ``mask`` is set on a stash of ``count`` items. Returns the new count.

    A barrier must follow."""
    one = mask.to(tl.int32)
    tl.store(stash + count + tl.cumsum(one, 0) - one, item, mask=mask)
    return count + tl.sum(one, 0)


@jit
def push_bits(stash, count, bitmap, first, words, WORDS: tl.constexpr):
    """Push the set bits of ``bitmap`` in words ``first`` to ``first + WORDS``; returns the count.

    Bits are numbered from the bitmap's first bit, int32. Afterwards all stores are visible.
    """
    w = first + tl.arange(0, WORDS)
    word = load_words(bitmap + w, w < words)
    n = popcount(word)
    slot = count + tl.cumsum(n, 0) - n
    count += tl.sum(n, 0)
    tl.debug_barrier()  # wait for threads that still read
    while tl.max((word != 0).to(tl.int32), 0) > 0:
        some = word != 0
        # Zeros below the lowest one; the compiler would branch for a word that may be 0.
        sure = word | 0x80000000
        bit = popcount((sure - 1) & (sure ^ 0xFFFFFFFF))
        tl.store(stash + slot, w * 32 + bit, mask=some)
        slot += 1
        word = word & (word - 1)
    tl.debug_barrier()
    return count


@jit
def pop(stash, count, BLOCK: tl.constexpr):
    """The last ``BLOCK`` items of a stash of ``count``, -1 for missing ones."""
    at = count - 1 - tl.arange(0, BLOCK)
    return tl.load(stash + at, mask=at >= 0, other=-1, volatile=True)


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


@jit
def salt_of(seed, i):
    """Salt of partition ``i``, uint32. Both arguments are int32 scalars; ``i`` may be a number."""
    turn = tl.full([], 1, tl.uint32) + i
    return fmix32(seed.to(tl.uint32, bitcast=True) * 0x9E3779B9 + turn.to(tl.uint32) * 0x7F4A7C15)


@jit
def hash_of(key, seed, i):
    """Hashes of keys for partition ``i``; uint32."""
    return fmix32(key ^ salt_of(seed, i))


@jit
def cell_at(h, partition, i):
    """Cells in the whole table, int32, of the hashes ``h`` (uint32) for partition ``i``."""
    spread = tl.umulhi(h, tl.full(h.shape, 0, tl.uint32) + partition)
    return spread.to(tl.int32) + i * partition


@jit
def contribution(key, h, PACKED: tl.constexpr):
    """The number that a key with the hash ``h`` adds to an entry; int64."""
    if PACKED:
        return ((h & 0xFFFF).to(tl.int64) << 16) + 1
    else:
        return (key.to(tl.int64) << 32) + 1


@jit
def unmix32(h):
    """The inverse of ``fmix32``; uint32."""
    h = h ^ (h >> 16)
    h = h * 0x7ED1B41D
    h = h ^ (h >> 13) ^ (h >> 26)
    h = h * 0xA5CB9243
    return h ^ (h >> 16)


@jit
def key_of(cell, low, seed, partition, inverse, HASHES: tl.constexpr):
    """The key of each cell whose hash has these low 16 bits; uint32.

    Args:
        cell: int32, in the whole table.
        low: uint32; higher bits are ignored.
        inverse: ``2^63 // partition``, for a partition with at most ``0xFFFE`` hashes per cell.
    """
    salt = tl.full(cell.shape, 0, tl.uint32) + salt_of(seed, 0)
    place = cell
    for i in tl.static_range(1, HASHES):
        there = cell >= i * partition
        salt = tl.where(there, salt_of(seed, i), salt)
        place = tl.where(there, cell - i * partition, place)
    # At most 2 below the first hash of the cell: the quotient and the product are rounded down.
    first = ((place.to(tl.int64) * inverse) >> 31).to(tl.uint32)
    return unmix32(first + ((low - first) & 0xFFFF)) ^ salt
