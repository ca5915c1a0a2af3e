"""Places: locate the elements of a thread among the decoded entries of a tile.

A bit says whether a message has the group of an element. Counting these bits of a thread's
neighbouring elements gives the slot of each group. An element's place is that of the slot's values,
or of the zeros beside them. Two halves of the elements are counted in one number.

Worked example (groups of 1, 4 elements with the bits 1, 0, 1, 1, the first slot is 5): the slots
are 5, 6, 6, 7, so the places, values or zeros, are 2 * 5 + 1, 2 * 6, 2 * 6 + 1, 2 * 7 + 1.
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import in_order, load_bitmap


@jit
def load_halves(
    bitmap, tile, groups, GROUP: tl.constexpr, EACH: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Bits of each thread's groups: a tuple of ``[THREADS]`` uint32. Each has up to 16 bits of the
    first half from bit 0 on, and as many of the second half from bit 16 on."""
    COUNT: tl.constexpr = EACH // GROUP
    HALF: tl.constexpr = COUNT // 2
    t = tile * THREADS + tl.arange(0, THREADS)
    if COUNT == 64:
        lower = load_bitmap(bitmap, 2 * t, groups)
        upper = load_bitmap(bitmap, 2 * t + 1, groups)
        return ((lower & 0xFFFF) | (upper << 16), (lower >> 16) | (upper & 0xFFFF0000))
    else:
        word = load_bitmap(bitmap, t // (32 // COUNT), groups)
        if COUNT == 32:
            return (word,)
        else:
            word = word >> (t % (32 // COUNT) * COUNT).to(tl.uint32)
            LOWER: tl.constexpr = (1 << HALF) - 1
            return ((word & LOWER) | ((word & (LOWER << HALF)) << (16 - HALF)),)


@jit
def count_halves(halves):
    """Number of set bits of the lower and of the upper half, int32."""
    x = halves[0] - ((halves[0] >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    if len(halves) == 2:
        y = halves[1] - ((halves[1] >> 1) & 0x55555555)
        y = (y & 0x33333333) + ((y >> 2) & 0x33333333)
        x += (y + (y >> 4)) & 0x0F0F0F0F
    x = (x + (x >> 8)) & 0x00FF00FF
    return (x & 0xFFFF).to(tl.int32), (x >> 16).to(tl.int32)


@jit
def places(halves, lower, upper, GROUP: tl.constexpr, EACH: tl.constexpr):
    """Places of the threads' elements in :func:`beside_zeros` of the slots.

    Slot ``k`` has its zeros at ``2 * k``, its values at ``2 * k + 1``, in groups. Both halves are
    counted at once, in bytes, so that one mask or shift gives a place.

    Args:
        halves: tuple of ``[T]`` uint32, see :func:`load_halves`.
        lower, upper: ``[T]`` int32, slot of the first group of each half; in bytes, doubled, they
            fit 16 bits.

    Returns:
        ``[T * EACH]`` int32.
    """
    HALF: tl.constexpr = EACH // GROUP // 2
    BYTES: tl.constexpr = 4 * GROUP
    at = ((upper << 16) | lower).to(tl.uint32, bitcast=True) * (2 * BYTES)
    low, high = (), ()
    for i in tl.static_range(HALF):
        here = ((halves[i // 16] >> (i % 16)) & 0x10001) * BYTES
        at += here
        first = ((at & 0xFFFC) >> 2).to(tl.int32)
        second = (at >> 18).to(tl.int32)
        for lane in tl.static_range(GROUP):
            low += (first + lane,)
            high += (second + lane,)
        at += here
    return in_order(low + high, EACH)
