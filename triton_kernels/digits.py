"""Digits: the sizes of marked groups, counted digit by digit from the top.

A size is the bit pattern of ``|x|``, 31 bits that sort like ``|x|``. :mod:`.trim` looks for the
smallest size that stays; histograms of 12, 10 and 9 bits find it. They lie one after another in a
row's buffer, followed by the number of groups that were put off, and by the counts of ties, one per
program.
"""

from __future__ import annotations

from .jit import constant, jit, tl

# The lowest bit of the first and of the second digit.
FIRST = constant(19)
SECOND = constant(9)
# Where the second and third histogram, the number of groups put off, and the ties begin.
SECONDS = constant(4096)
THIRDS = constant(4096 + 1024)
PUT_OFF = constant(4096 + 1024 + 512)
TIES = constant(4096 + 1024 + 512 + 1)


@jit
def _pick(count, need):
    """Bin of the ``need``-th largest, and the number of that bin among the ``need`` largest."""
    larger = tl.sum(count, 0) - tl.cumsum(count, 0)  # [bins], falls to 0
    digit = tl.sum((larger >= need).to(tl.int32), 0)
    return digit, need - tl.max(tl.where(larger < need, larger, 0), 0)


@jit
def _pick_first(histogram, need):
    """:func:`_pick` from 4096 bins, in two steps of 64."""
    count = tl.zeros([64], tl.int32)
    row = tl.arange(0, 64)[:, None] * 64
    for part in tl.static_range(4):
        count += tl.sum(tl.load(histogram + row + (part * 16 + tl.arange(0, 16)[None, :])), 1)
    high, need = _pick(count, need)
    low, need = _pick(tl.load(histogram + high * 64 + tl.arange(0, 64)), need)
    return high * 64 + low, need


@jit
def prefix(histogram, capacity, DIGITS: tl.constexpr):
    """The first digits of the smallest size that stays, and how many groups with them stay."""
    known, need = _pick_first(histogram, tl.maximum(capacity, 1))
    if DIGITS > 1:
        digit, need = _pick(tl.load(histogram + SECONDS + tl.arange(0, 1024)), need)
        known = (known << 10) | digit
    if DIGITS > 2:
        digit, need = _pick(tl.load(histogram + THIRDS + tl.arange(0, 512)), need)
        known = (known << 9) | digit
    return known, need - (capacity == 0).to(tl.int32)
