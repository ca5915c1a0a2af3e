"""Stash: a program's pending work items, in its own piece of global memory.

A program of one warp finds work (set bits, cells with one key) at only a few of the places where it
looks. It pushes the work on its stash, and pops a whole warp of it at a time, so that no lane is
idle. No other program uses this piece of memory.

Worked example (4 lanes): the words 0b101, 0, 0b10, 0 push the groups 0, 2 and 65; one more is
enough for a step.
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import load_words, popcount

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
