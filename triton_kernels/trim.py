"""Trim: if more groups than the capacity are marked, keep the largest, ties to the lower index.

The size of a group is the bit pattern of its largest ``|x|``, 31 bits that sort like ``|x|``. The
smallest size that stays is found digit by digit, from the top, by histograms of 12, 10 and 9 bits.
They lie one after another in a row's buffer, followed by the number of groups that were put off,
and by the counts of ties, one per program.

1. A dense pass counts the first digits of all marked groups. Nearly all sizes are within a factor
   of four above the threshold, that is, in 32 bins: a thread counts these in registers, four bits
   per bin, which widen to 8 and 16 bits before they run over. Groups elsewhere are added to the
   histogram one by one. With all of them, that would take far longer than the pass: they wait for
   a few addresses.
2. A dense pass drops the groups whose first digit is smaller than that of the smallest size that
   stays. Those with the same digit are candidates, mostly few; it marks them in a bitmap, and
   counts their second digits.
3. The third pass counts the last digits of candidates that agree in the second.
4. The fourth counts, per program, the candidates of exactly the smallest size.
5. The fifth drops the smaller candidates, and, from the highest index on, those of that size that
   find no place.

Every access of the dense passes to gradients and residuals is 16 bytes wide, as in :mod:`.select`,
except where a direct sketch of single elements puts x back. Even at 5%, a third (float32) to half
(bfloat16) of all sectors hold a marked element, so skipping the rest would save little. In the
last three passes, a thread has a word of candidates, and takes its lowest set bit until none is
left.

The host knows no counts, so all five kernels are launched every time, and return at once if the
count is within the capacity and no group was put off. A dropped group writes x to a bfloat16
residual; a float32 residual already holds x since the selection. In a direct sketch made by the
dense pass, the residual holds the quantization error: there x is restored, and groups that were put
off are sent, see :mod:`.select`.

Worked example (2-bit digits, capacity 3): sizes 0b0111, 0b0110, 0b0001, 0b0110, 0b0110. The top
digits 01, 01, 00, 01, 01 have histogram (1, 4, 0, 0): the third largest is among the 4 in bin 01,
which are the candidates, and group 2 is dropped. Their low digits 11, 10, 10, 10 have (0, 0, 3, 1):
one is larger, and two of the three 10s stay, which are the groups 1 and 3; group 4 is dropped.

Worked example of counting (4 bins, counted in 8 bits): threshold digit 01, digits 01, 11, 01, 10. A
thread adds 1, 1 << 4, 1 and 1 << 2: 0b010110 is two, one and one in the bins from 01 on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.sketch import SketchLayout

from .groups import clips, load_groups, restore, send
from .jit import cdiv, constant, jit, row_stride, tl, torch_call
from .scalar import (
    bits_of,
    load_words,
    lowest_bit,
    magnitude,
    narrow_finite,
    popcount,
    widen,
    word_of,
)
from .scratch import buffer

# The lowest bit of the first and of the second digit.
_FIRST = constant(19)
_SECOND = constant(9)
# Where the second and third histogram, the number of groups put off, and the ties begin.
_SECONDS = constant(4096)
_THIRDS = constant(4096 + 1024)
_PUT_OFF = constant(4096 + 1024 + 512)
_TIES = constant(4096 + 1024 + 512 + 1)
# Elements of a tile of the dense passes: with 16 per thread, the registers leave room for too few
# programs.
_DENSE_TILE = 1024
_DENSE_WARPS = 4
# Tiles of a program of the first pass, at most: about half of what its counters hold.
_TILES = 32
# Bins in a word of four bits each.
_BINS = constant(16)
# Words of a tile of the last three kernels, one per thread. (With two threads per word, in four
# warps, ptxas spills in some variants.)
_WORDS = 64
_WARPS = 2
# The target for the number of programs of all rows together. By their registers, an H100 runs 2,112
# of `count_kernel` or `drop_kernel` at once.
_PROGRAMS = 2048
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("words", "capacity", "counts", "index_stride", "counts_stride", "histogram_stride"),
    *("step", "cells_stride", "candidates_stride"),
]


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
        digit, need = _pick(tl.load(histogram + _SECONDS + tl.arange(0, 1024)), need)
        known = (known << 10) | digit
    if DIGITS > 2:
        digit, need = _pick(tl.load(histogram + _THIRDS + tl.arange(0, 512)), need)
        known = (known << 9) | digit
    return known, need - (capacity == 0).to(tl.int32)


@jit
def _load_tile(grad, residual, cells, unit, start, n, WORDS: tl.constexpr, LANES: tl.constexpr):
    """x before trimming of the groups of a tile from ``start`` on, if they are marked.

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
    base = tl.load(threshold + d).to(tl.int32, bitcast=True) >> _FIRST
    none = tl.zeros([WORDS * 32 // FOLD], tl.int64)
    # Bins 0 to 15 and 16 to 31, the even and the odd ones of each, in eight bits.
    even, odd, even_above, odd_above = none, none, none, none
    for tile in range(p, tl.cdiv(words, WORDS), tl.num_programs(0)):
        first = (tl.zeros([], tl.int64) + tile) * WORDS
        word = load_words(index + first + tl.arange(0, WORDS), tl.arange(0, WORDS) < words - first)
        x, _old, _symbol = _load_tile(grad, residual, cells, unit, first * 32, n, WORDS, LANES)
        digit = tl.max(magnitude(x), 2) >> _FIRST
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
        x, old, symbol = _load_tile(grad, residual, cells, unit, first * 32, n, WORDS, LANES)
        size = tl.max(magnitude(x), 2)
        marked = bits_of(word)
        candidate = marked & ((size >> _FIRST) == known)
        bin = row + _SECONDS + ((size >> _SECOND) & 0x3FF).to(tl.int64)
        tl.atomic_add(bin, 1, mask=candidate, sem="relaxed")
        goes = marked & ((size >> _FIRST) < known)
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


@jit
def _load_groups(grad, residual, cells, unit, key, there, n, LANES: tl.constexpr):
    """:func:`load_groups` before trimming, and symbols if there are cells."""
    x, j, inside = load_groups(grad, residual, key, there, n, LANES)
    symbol = tl.zeros_like(key)
    if cells is not None:
        symbol = tl.load(cells + key, mask=there, other=0)
        if residual is not None:
            x = restore(symbol, x, unit, LANES)
    return x, j, inside, symbol


@jit
def _put_back(residual, cells, x, symbol, key, j, inside, goes, unit, levels):
    """Undo what the selection did to groups that it should not have marked, where ``goes``.

    Returns:
        which of them had a clipped element, int32; 0 without cells.
    """
    clipped = tl.zeros_like(key)
    # Several threads may have the same group: all must have read before one writes.
    tl.debug_barrier()
    if residual is not None:
        new = narrow_finite(x, residual.dtype.element_ty)
        tl.store(residual + j, new, mask=inside & goes[:, None])
    if cells is not None:
        tl.store(cells + key, tl.zeros_like(symbol), mask=goes)
        clipped = tl.where(goes & (symbol != 0), clips(x, unit, levels), 0)
    return clipped


@jit(do_not_specialize=_PLAIN)
def count_kernel(
    grad, residual, index, candidates, counts, histograms, cells, step, levels, n, words, capacity,
    grad_stride, residual_stride, index_stride, candidates_stride, counts_stride, histogram_stride,
    cells_stride,
    DIGITS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0)
    if tl.load(counts + d * counts_stride) <= capacity:
        return
    row = histograms + d * histogram_stride
    known, _places = prefix(row, capacity, DIGITS)
    candidates += d * candidates_stride
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    unit = 1.0
    if cells is not None:
        cells += d * cells_stride
        unit = tl.load(step + d)
    ties = tl.zeros([WORDS], tl.int32)
    share = tl.cdiv(tl.cdiv(words, WORDS), tl.num_programs(0))
    for tile in range(p * share, tl.minimum((p + 1) * share, tl.cdiv(words, WORDS))):
        w = tile * WORDS + tl.arange(0, WORDS)
        word = load_words(candidates + w, w < words)
        for _ in range(tl.max(popcount(word), 0)):
            there = word != 0
            key = w * 32 + lowest_bit(word)
            x, _j, _inside, _symbol = _load_groups(
                grad, residual, cells, unit, key, there, n, LANES
            )
            size = tl.max(magnitude(x), 1)
            if DIGITS == 2:
                there = there & ((size >> _SECOND) == known)
                tl.atomic_add(row + _THIRDS + (size & 0x1FF), 1, mask=there, sem="relaxed")
            else:
                ties += (there & (size == known)).to(tl.int32)
            word &= word - 1
    if DIGITS == 3:
        tl.store(row + _TIES + p, tl.sum(ties, 0))


@jit(do_not_specialize=_PLAIN)
def drop_kernel(
    grad, residual, index, candidates, counts, histograms, cells, step, levels, n, words, capacity,
    grad_stride, residual_stride, index_stride, candidates_stride, counts_stride, histogram_stride,
    cells_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    # Whether the selection changed what a marked group has in the residual or the cells.
    BACK: tl.constexpr = cells is not None or (
        residual is not None and residual.dtype.element_ty != tl.float32
    )
    # Whether groups may have been put off.
    SENDS: tl.constexpr = cells is not None and residual is not None
    d = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0)
    found = counts + d * counts_stride
    row = histograms + d * histogram_stride
    over = tl.load(found) > capacity
    late = 0
    if SENDS:
        late = tl.load(row + _PUT_OFF)
    if not (over | (late > 0)):
        return
    taken = tl.zeros([], tl.int32)
    for first in range(0, p, WORDS):
        before = first + tl.arange(0, WORDS)
        taken += tl.sum(tl.load(row + _TIES + before, mask=before < p, other=0), 0)
    last, places = prefix(row, capacity, 3)
    index += d * index_stride
    candidates += d * candidates_stride
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    unit = 1.0
    clipped = tl.zeros([WORDS], tl.int32)
    if cells is not None:
        cells += d * cells_stride
        unit = tl.load(step + d)
        if over & (p == 0):
            tl.store(found + 2, capacity)
    share = tl.cdiv(tl.cdiv(words, WORDS), tl.num_programs(0))
    for tile in range(p * share, tl.minimum((p + 1) * share, tl.cdiv(words, WORDS))):
        w = tile * WORDS + tl.arange(0, WORDS)
        stays = load_words(index + w, w < words)
        if over:
            # The bits that remain are those of candidates that go.
            dropped = load_words(candidates + w, w < words)
            tied = tl.zeros([WORDS], tl.uint32)
            word = dropped
            for _ in range(tl.max(popcount(word), 0)):
                key = w * 32 + lowest_bit(word)
                x, _j, _inside, _symbol = _load_groups(
                    grad, residual, cells, unit, key, word != 0, n, LANES
                )
                size = tl.max(magnitude(x), 1)
                bit = word & (0 - word)
                dropped ^= tl.where(size > last, bit, 0)
                tied |= tl.where(size == last, bit, 0)
                word ^= bit
            # Ties fill the remaining places, from the lowest index on.
            ties = popcount(tied)
            turn = taken + tl.cumsum(ties, 0) - ties
            taken += tl.sum(ties, 0)
            for _ in range(tl.max(ties, 0)):
                bit = tied & (0 - tied)
                dropped ^= tl.where(turn < places, bit, 0)
                tied ^= bit
                turn += 1
            stays ^= dropped
            # Several warps may read the words; all must have read before one writes.
            tl.debug_barrier()
            tl.store(index + w, stays.to(tl.int32, bitcast=True), mask=w < words)
            if BACK:
                word = dropped
                for _ in range(tl.max(popcount(word), 0)):
                    goes = word != 0
                    key = w * 32 + lowest_bit(word)
                    x, j, inside, symbol = _load_groups(
                        grad, residual, cells, unit, key, goes, n, LANES
                    )
                    clipped -= _put_back(
                        residual, cells, x, symbol, key, j, inside, goes, unit, levels
                    )
                    word &= word - 1
        if SENDS:
            word = tl.where(late > 0, stays, 0)
            for _ in range(tl.max(popcount(word), 0)):
                key = w * 32 + lowest_bit(word)
                # Send groups that were put off, and again others whose cell is 0.
                again = tl.load(cells + key, mask=word != 0, other=1) == 0
                x, j, inside = load_groups(grad, residual, key, again, n, LANES)
                symbol, left = send(x, unit, levels, LANES)
                tl.debug_barrier()
                tl.store(residual + j, left, mask=inside)
                tl.store(cells + key, symbol, mask=again)
                clipped += tl.where(again, clips(x, unit, levels), 0)
                word &= word - 1
    if cells is not None:
        tl.atomic_add(found + 3, tl.sum(clipped, 0), sem="relaxed")


def cleared_histograms(grad: Tensor, layout: SketchLayout) -> Tensor:
    """The counters of :func:`trim`; the selection counts groups put off in :func:`put_off_of`."""
    programs = min(cdiv(_PROGRAMS, len(grad)), cdiv(layout.words, _WORDS))
    shape = (len(grad), _TIES.value + programs)
    histograms = buffer("histograms", shape, torch.int32, grad.device, layout)
    torch_call(Tensor.zero_, histograms)
    return histograms


def put_off_of(histograms: Tensor) -> Tensor:
    """``[W]`` int32, number of groups that the selection put off."""
    return histograms[:, _PUT_OFF.value]


def trim(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    index: Tensor,
    counts: Tensor,
    histograms: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
    cells: Tensor | None = None,
    step: Tensor | None = None,
    levels: float = 0.0,
) -> None:
    """Clear bits of ``index`` until every destination keeps at most ``capacity`` groups.

    Args:
        grad, residual, threshold, index, counts, cells, step, levels: as :func:`.select.select` got
            and left them. Cells of dropped groups are cleared, and the third and fourth counts
            become those of the groups that stay.
        histograms: of :func:`cleared_histograms`.
    """
    (W, words), lanes, programs = (
        index.shape,
        layout.symbol.lanes,
        histograms.shape[1] - _TIES.value,
    )
    candidates = buffer("candidates", (W, words), torch.int32, grad.device, layout)
    given = (
        grad, residual, index, candidates, counts, histograms, cells, step, levels, grad.shape[1],
        words, capacity, grad.stride(0), row_stride(residual), index.stride(0),
        candidates.stride(0), counts.stride(0), histograms.stride(0), row_stride(cells),
    )  # fmt: skip
    dense = {"LANES": lanes, "WORDS": _DENSE_TILE // (32 * lanes), "num_warps": _DENSE_WARPS}
    tiles = cdiv(words * 32 * lanes, _DENSE_TILE)
    digit_kernel[(min(max(programs, cdiv(tiles, _TILES)), tiles), W)](threshold, *given, **dense)
    narrow_kernel[(min(programs, tiles), W)](*given, **dense)
    sparse = {"LANES": lanes, "WORDS": _WORDS, "num_warps": _WARPS}
    for digits in range(2, 4):
        count_kernel[(programs, W)](*given, DIGITS=digits, **sparse)
    drop_kernel[(programs, W)](*given, **sparse)
