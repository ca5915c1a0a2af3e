"""Narrow: two dense passes of trimming leave few groups to decide on.

The first pass counts the first digits of all marked groups. Nearly all sizes are within a factor of
four above the threshold, that is, in 32 bins: a thread counts these in registers, four bits per
bin, which widen to 8 and 16 bits before they run over. Groups elsewhere are added to the histogram
one by one. With all of them, that would take far longer than the pass: they wait for a few
addresses.

The second pass drops the groups whose first digit is smaller than that of the smallest size that
stays. Those with the same digit are candidates, mostly few; it marks them in a bitmap, and counts
their second digits.

Every access to gradients and residuals is 16 bytes wide, as in :mod:`.select`, except where a
direct sketch of single elements puts x back. Even at 5%, a third (float32) to half (bfloat16) of
all sectors hold a marked element, so skipping the rest would save little.

Worked example (4 bins of 2-bit digits, counted in 8 bits): threshold digit 01, digits 01, 11, 01,
10. A thread adds 1, 1 << 4, 1 and 1 << 2: 0b010110 is two, one and one in the bins from 01 on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .digits import FIRST, SECOND, SECONDS, prefix
from .jit import cdiv, constant, jit, tl
from .scalar import bits_of, load_words, magnitude, narrow_finite, widen, word_of
from .symbols import clips, restore

# Elements of a tile: with 16 per thread, the registers leave room for too few programs.
_TILE = 1024
_WARPS = 4
# Tiles of a program of the first pass, at most: about half of what its counters hold.
_TILES = 32
# Bins in a word of four bits each.
_BINS = constant(16)
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("words", "capacity", "counts", "index_stride", "counts_stride", "histogram_stride"),
    *("step", "cells_stride", "candidates_stride"),
]


@jit
def _load(grad, residual, cells, unit, start, n, WORDS: tl.constexpr, LANES: tl.constexpr):
    """x before trimming of the groups of a tile, if they are marked.

    Args:
        grad, residual, cells: first element of the destination; residual and cells may be None.
        start: first group.

    Returns:
        x ``[WORDS, 32, LANES]``; what was read last, of the same elements in a row, the residual
        if there is one; symbols ``[WORDS, 32]``, 0 without cells.
    """
    j = tl.arange(0, WORDS * 32 * LANES)
    inside = j < n - start * LANES
    if residual is not None and residual.dtype.element_ty == tl.float32:
        old = tl.load(residual + start * LANES + j, mask=inside, other=0.0)
        x = old
    else:
        old = tl.load(grad + start * LANES + j, mask=inside, other=0.0)
        x = widen(old)
        if residual is not None:
            old = tl.load(residual + start * LANES + j, mask=inside, other=0.0)
            x += widen(old)
    x = tl.reshape(x, [WORDS, 32, LANES])
    symbol = tl.zeros([WORDS, 32], tl.int32)
    if cells is not None:
        group = tl.arange(0, WORDS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        there = group < tl.cdiv(n, LANES) - start
        symbol = tl.load(cells + start + group, mask=there, other=0)
        if residual is not None:
            x = restore(symbol, x, unit, LANES)
    return x, old, symbol


@jit
def _halves(counted, BITS: tl.constexpr):
    """Counters of ``BITS`` bits in int64, as those at even and at odd places, of twice the bits."""
    MASK: tl.constexpr = 0x0F0F0F0F0F0F0F0F if BITS == 4 else 0x00FF00FF00FF00FF
    return counted & MASK, (counted >> BITS) & MASK


@jit(do_not_specialize=["threshold", *_PLAIN])
def digit_kernel(
    threshold, grad, residual, index, candidates, counts, histograms, cells, step, levels, n, words,
    capacity, grad_stride, residual_stride, index_stride, candidates_stride, counts_stride,
    histogram_stride, cells_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    # Neighbours that a thread counts in four bits: mostly, it has loaded them.
    FOLD: tl.constexpr = 4 // LANES
    d = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0)
    if tl.load(counts + d * counts_stride) <= capacity:
        return
    index += d * index_stride
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    unit = 1.0
    if cells is not None:
        cells += d * cells_stride
        unit = tl.load(step + d)
    row = histograms + d * histogram_stride
    base = tl.load(threshold + d).to(tl.int32, bitcast=True) >> FIRST
    none = tl.zeros([WORDS * 32 // FOLD], tl.int64)
    # Bins 0 to 15 and 16 to 31, the even and the odd ones of each, in eight bits.
    even, odd, even_above, odd_above = none, none, none, none
    for tile in range(p, tl.cdiv(words, WORDS), tl.num_programs(0)):
        first = (tl.zeros([], tl.int64) + tile) * WORDS
        word = load_words(index + first + tl.arange(0, WORDS), tl.arange(0, WORDS) < words - first)
        x, _old, _symbol = _load(grad, residual, cells, unit, first * 32, n, WORDS, LANES)
        digit = tl.max(magnitude(x), 2) >> FIRST
        bin = digit - base
        marked = bits_of(word)
        near = bin.to(tl.uint32, bitcast=True)
        far = marked & (near >= 2 * _BINS)
        if tl.max(tl.max(far.to(tl.int32), 1), 0) > 0:
            # Widened here, so that only 32 bits per offset move to the threads that add.
            tl.atomic_add(row + digit.to(tl.int64), 1, mask=far, sem="relaxed")
        one = tl.full(near.shape, 1, tl.int64) << ((near % _BINS) * 4).to(tl.int64)
        low = tl.where(marked & (near < _BINS), one, 0)
        high = tl.where(marked & (near // _BINS == 1), one, 0)
        more, others = _halves(tl.sum(tl.reshape(low, [none.shape[0], FOLD]), 1), 4)
        even += more
        odd += others
        more, others = _halves(tl.sum(tl.reshape(high, [none.shape[0], FOLD]), 1), 4)
        even_above += more
        odd_above += others
    counted = (even, odd, even_above, odd_above)
    for part in tl.static_range(4):
        halves = _halves(counted[part], 8)
        for half in tl.static_range(2):
            total = tl.sum(halves[half], 0)
            place = tl.arange(0, 4)
            found = ((total >> (place * 16).to(tl.int64)) & 0xFFFF).to(tl.int32)
            bins = row + base + ((part // 2) * _BINS + place * 4 + half * 2 + part % 2)
            tl.atomic_add(bins, found, mask=found > 0, sem="relaxed")


@jit(do_not_specialize=_PLAIN)
def narrow_kernel(
    grad, residual, index, candidates, counts, histograms, cells, step, levels, n, words, capacity,
    grad_stride, residual_stride, index_stride, candidates_stride, counts_stride, histogram_stride,
    cells_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    # A bfloat16 residual does not hold x of marked groups.
    OLD: tl.constexpr = residual is not None and residual.dtype.element_ty != tl.float32
    d = tl.program_id(1).to(tl.int64)
    found = counts + d * counts_stride
    if tl.load(found) <= capacity:
        return
    row = histograms + d * histogram_stride
    known, _places = prefix(row, capacity, 1)
    index += d * index_stride
    candidates += d * candidates_stride
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    unit = 1.0
    if cells is not None:
        cells += d * cells_stride
        unit = tl.load(step + d)
    clipped = tl.zeros([WORDS, 32], tl.int32)
    j = tl.arange(0, WORDS * 32 * LANES)
    for tile in range(tl.program_id(0), tl.cdiv(words, WORDS), tl.num_programs(0)):
        first = (tl.zeros([], tl.int64) + tile) * WORDS
        w = tl.arange(0, WORDS)
        word = load_words(index + first + w, w < words - first)
        x, old, symbol = _load(grad, residual, cells, unit, first * 32, n, WORDS, LANES)
        size = tl.max(magnitude(x), 2)
        marked = bits_of(word)
        candidate = marked & ((size >> FIRST) == known)
        bin = row + SECONDS + ((size >> SECOND) & 0x3FF).to(tl.int64)
        tl.atomic_add(bin, 1, mask=candidate, sem="relaxed")
        goes = marked & ((size >> FIRST) < known)
        kept = word.to(tl.int32, bitcast=True) ^ word_of(goes)
        # Several threads may read a word, or a group: all must have read before one writes.
        tl.debug_barrier()
        tl.store(index + first + w, kept, mask=w < words - first)
        tl.store(candidates + first + w, word_of(candidate), mask=w < words - first)
        start = first * 32 * LANES
        inside = j < n - start
        back = tl.reshape(tl.broadcast_to(goes[:, :, None], x.shape), j.shape)
        if OLD:
            new = narrow_finite(tl.reshape(x, j.shape), old.dtype)
            tl.store(residual + start + j, tl.where(back, new, old), mask=inside)
        if cells is not None:
            if residual is not None:
                tl.store(residual + start + j, tl.reshape(x, j.shape), mask=inside & back)
            group = w[:, None] * 32 + tl.arange(0, 32)[None, :]
            tl.store(cells + first * 32 + group, tl.zeros_like(symbol), mask=goes)
            clipped -= tl.where(goes & (symbol != 0), clips(x, unit, levels), 0)
    if cells is not None:
        tl.atomic_add(found + 3, tl.sum(tl.sum(clipped, 1), 0), sem="relaxed")


def narrow(
    threshold: Tensor, given: tuple[Any, ...], *, lanes: int, words: int, rows: int, programs: int
) -> None:
    """Start both passes.

    Args:
        threshold: ``[W]``, of the selection.
        given: arguments of the kernels of :mod:`.trim`.
        lanes: elements of a group.
        words: of a row's bitmap.
        rows: W.
        programs: the target for a row.
    """
    options = {"LANES": lanes, "WORDS": _TILE // (32 * lanes), "num_warps": _WARPS}
    tiles = cdiv(words * 32 * lanes, _TILE)
    many = max(programs, cdiv(tiles, _TILES))
    digit_kernel[(min(many, tiles), rows)](threshold, *given, **options)
    narrow_kernel[(min(programs, tiles), rows)](*given, **options)
