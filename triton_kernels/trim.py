"""Trim: if more groups than the capacity are marked, keep the largest, ties to the lower index.

The size of the smallest group that stays is found digit by digit, from the top, by histograms of
11, 10 and 10 bits of the (31-bit) float pattern. Each pass looks only at groups that agree with the
digits found so far. A fourth pass counts, per program, the groups of exactly that size. The fifth
gives the remaining places to the lower indices, and clears the other bits.

Worked example (2-bit digits, capacity 3): sizes 0b0111, 0b0110, 0b0001, 0b0110, 0b0110. The top
digits 01, 01, 00, 01, 01 have histogram (1, 4, 0, 0): the third largest is among the 4 in bin 01.
Their low digits 11, 10, 10, 10 have (0, 0, 3, 1): one is larger, and two of the three 10s stay,
which are the groups 1 and 3; groups 2 and 4 are dropped.

The host knows no counts, so all five kernels are launched every time, and return at once if the
count is within the capacity. Otherwise each reads the bitmap and the marked groups: a thread has a
word, and takes its lowest set bit until none is left. Most groups agree in their top digit, so its
histogram has copies, between which programs alternate; otherwise all of them would wait for a few
addresses. A dropped group writes x to a bfloat16 residual; a float32 residual already holds x since
the selection. In a direct sketch made by the dense pass, the residual holds the quantization error:
there x is restored, and groups that were put off are sent, see :mod:`.direct`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
from torch import Tensor

from .direct import Direct, arguments, stride
from .gather import load_groups
from .jit import constant, jit, tl
from .scalar import load_words, lowest_bit, magnitude, narrow_finite, popcount
from .scratch import buffer
from .symbols import clips, restore, send

# Words at once, one per thread. (With two threads per word, in four warps, ptxas spills in some
# variants.)
_WORDS = 64
_WARPS = 2
# The target for the number of programs of all rows together. By their registers, an H100 runs 2,112
# of `drop_kernel` at once, and 4,224 of `count_kernel`.
_PROGRAMS = 2048
# Copies of the first histogram, and the starts in a row's buffer of the second and third histogram,
# the number of groups put off, and the counts of ties, one per program.
_COPIES = constant(8)
_SECOND = constant(8 * 2048)
_THIRD = constant(8 * 2048 + 1024)
_PUT_OFF = constant(8 * 2048 + 2 * 1024)
_TIES = constant(8 * 2048 + 2 * 1024 + 1)
# Arguments whose alignment makes no difference.
_PLAIN = [
    *("words", "capacity", "counts", "index_stride", "counts_stride", "histogram_stride"),
    *("step", "cells_stride"),
]


@jit
def _pick(count, need):
    """Bin of the ``need``-th largest, and the number of that bin among the ``need`` largest."""
    larger = tl.sum(count, 0) - tl.cumsum(count, 0)  # [bins], falls to 0
    digit = tl.sum((larger >= need).to(tl.int32), 0)
    return digit, need - tl.max(tl.where(larger < need, larger, 0), 0)


@jit
def _prefix(histogram, capacity, DIGITS: tl.constexpr):
    """The first digits of the smallest size that stays, and the number of groups with them that
    stay."""
    prefix = tl.zeros([], tl.int32)
    need = tl.maximum(capacity, 1)
    if DIGITS > 0:
        count = tl.zeros([2048], tl.int32)
        for copy in range(_COPIES):
            count += tl.load(histogram + copy * 2048 + tl.arange(0, 2048))
        prefix, need = _pick(count, need)
    if DIGITS > 1:
        digit, need = _pick(tl.load(histogram + _SECOND + tl.arange(0, 1024)), need)
        prefix = (prefix << 10) | digit
    if DIGITS > 2:
        digit, need = _pick(tl.load(histogram + _THIRD + tl.arange(0, 1024)), need)
        prefix = (prefix << 10) | digit
    return prefix, need - (capacity == 0).to(tl.int32)


@jit
def _load(grad, residual, cells, unit, key, there, n, LANES: tl.constexpr):
    """:func:`load_groups` before trimming, and symbols if there are cells."""
    x, j, inside = load_groups(grad, residual, key, there, n, LANES)
    symbol = tl.zeros_like(key)
    if cells is not None:
        symbol = tl.load(cells + key, mask=there, other=0)
        if residual is not None:
            x = restore(symbol, x, unit, LANES)
    return x, j, inside, symbol


@jit(do_not_specialize=_PLAIN)
def count_kernel(
    grad, residual, index, counts, histograms, cells, step, levels, n, words, capacity,
    grad_stride, residual_stride, index_stride, counts_stride, histogram_stride, cells_stride,
    DIGITS: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0)
    if tl.load(counts + d * counts_stride) <= capacity:
        return
    row = histograms + d * histogram_stride
    known, _places = _prefix(row, capacity, DIGITS)
    index += d * index_stride
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
        word = load_words(index + w, w < words)
        for _ in range(tl.max(popcount(word), 0)):
            there = word != 0
            key = w * 32 + lowest_bit(word)
            x, _j, _inside, _symbol = _load(grad, residual, cells, unit, key, there, n, LANES)
            size = tl.max(magnitude(x), 1)
            if DIGITS == 0:
                bin = row + (p % _COPIES) * 2048 + (size >> 20)
                tl.atomic_add(bin, 1, mask=there, sem="relaxed")
            elif DIGITS == 1:
                there = there & ((size >> 20) == known)
                tl.atomic_add(row + _SECOND + ((size >> 10) & 0x3FF), 1, mask=there, sem="relaxed")
            elif DIGITS == 2:
                there = there & ((size >> 10) == known)
                tl.atomic_add(row + _THIRD + (size & 0x3FF), 1, mask=there, sem="relaxed")
            else:
                ties += (there & (size == known)).to(tl.int32)
            word &= word - 1
    if DIGITS == 3:
        tl.store(row + _TIES + p, tl.sum(ties, 0))


@jit(do_not_specialize=_PLAIN)
def drop_kernel(
    grad, residual, index, counts, histograms, cells, step, levels, n, words, capacity,
    grad_stride, residual_stride, index_stride, counts_stride, histogram_stride, cells_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
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
    last, places = _prefix(row, capacity, 3)
    index += d * index_stride
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
        marked = load_words(index + w, w < words)
        stays = marked
        if over:
            stays = tl.zeros([WORDS], tl.uint32)
            tied = tl.zeros([WORDS], tl.uint32)
            word = marked
            for _ in range(tl.max(popcount(word), 0)):
                key = w * 32 + lowest_bit(word)
                x, _j, _inside, _symbol = _load(
                    grad, residual, cells, unit, key, word != 0, n, LANES
                )
                size = tl.max(magnitude(x), 1)
                bit = word & (0 - word)
                stays |= tl.where(size > last, bit, 0)
                tied |= tl.where(size == last, bit, 0)
                word ^= bit
            # Ties fill the remaining places, from the lowest index on.
            ties = popcount(tied)
            turn = taken + tl.cumsum(ties, 0) - ties
            taken += tl.sum(ties, 0)
            for _ in range(tl.max(ties, 0)):
                bit = tied & (0 - tied)
                stays |= tl.where(turn < places, bit, 0)
                tied ^= bit
                turn += 1
            # Several warps may read the words; all must have read before one writes.
            tl.debug_barrier()
            tl.store(index + w, stays.to(tl.int32, bitcast=True), mask=w < words)
            if cells is not None or (
                residual is not None and residual.dtype.element_ty != tl.float32
            ):
                word = marked ^ stays
                for _ in range(tl.max(popcount(word), 0)):
                    goes = word != 0
                    key = w * 32 + lowest_bit(word)
                    x, j, inside, symbol = _load(grad, residual, cells, unit, key, goes, n, LANES)
                    # Several threads may have the same word: all must read before one writes.
                    tl.debug_barrier()
                    if residual is not None:
                        new = narrow_finite(x, residual.dtype.element_ty)
                        tl.store(residual + j, new, mask=inside)
                    if cells is not None:
                        tl.store(cells + key, tl.zeros_like(symbol), mask=goes)
                        counted = goes & (symbol != 0)
                        clipped -= tl.where(counted, clips(x, unit, levels), 0)
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


def cleared_histograms(grad: Tensor, index: Tensor, layout: Hashable) -> Tensor:
    """The counters of :func:`trim`; the selection counts groups put off in :func:`put_off_of`."""
    W, words = index.shape
    programs = min(triton.cdiv(_PROGRAMS, W), triton.cdiv(words, _WORDS))
    shape = (W, _TIES.value + programs)
    histograms = buffer("histograms", shape, torch.int32, grad.device, layout)
    return histograms.zero_()


def put_off_of(histograms: Tensor) -> Tensor:
    """``[W]`` int32, number of groups that the selection put off."""
    return histograms[:, _PUT_OFF.value]


def trim(
    grad: Tensor,
    residual: Tensor | None,
    index: Tensor,
    counts: Tensor,
    *,
    lanes: int,
    capacity: int,
    layout: Hashable,
    histograms: Tensor | None = None,
    direct: Direct | None = None,
) -> None:
    """Clear bits of ``index`` until every destination keeps at most ``capacity`` groups.

    Args:
        grad, residual: as :func:`select` left them.
        index: ``[W, words]``, bitmaps, updated.
        counts: ``[W, 4]``; the first column is the number of marked groups. With cells, the third
            and fourth become the counts of the groups that stay.
        lanes: elements of a group.
        layout: the layout whose scratch buffers to use.
        histograms: from :func:`cleared_histograms`; default: new ones.
        direct: cells that the selection wrote; cells of dropped groups are cleared.
    """
    W, numel = grad.shape
    if capacity >= triton.cdiv(numel, lanes):
        return
    if histograms is None:
        histograms = cleared_histograms(grad, index, layout)
    programs = histograms.shape[1] - _TIES.value
    given = (
        grad, residual, index, counts, histograms, *arguments(direct), numel,
        index.shape[1], capacity,
        grad.stride(0), 0 if residual is None else residual.stride(0), index.stride(0),
        counts.stride(0), histograms.stride(0), stride(direct),
    )  # fmt: skip
    options = {"LANES": lanes, "WORDS": _WORDS, "num_warps": _WARPS, "enable_fp_fusion": False}
    for digits in range(4):
        count_kernel[(programs, W)](*given, DIGITS=digits, **options)
    drop_kernel[(programs, W)](*given, **options)
