"""Trim: if more groups than the capacity are marked, keep the largest, ties to the lower index.

The size of the smallest group that stays is found digit by digit, from the top (:mod:`.digits`).
Two dense passes (:mod:`.narrow`) find its first digit, drop the groups that are smaller by that
alone, list those with the same first digit, the candidates, in a bitmap of their own, and count
their second digits. The third pass counts the last digits of candidates that agree in the second.
The fourth counts, per program, the candidates of exactly the smallest size. The fifth drops the
smaller candidates, and, from the highest index on, those of that size that find no place.

Worked example (2-bit digits, capacity 3): sizes 0b0111, 0b0110, 0b0001, 0b0110, 0b0110. The top
digits 01, 01, 00, 01, 01 have histogram (1, 4, 0, 0): the third largest is among the 4 in bin 01,
which are the candidates, and group 2 is dropped. Their low digits 11, 10, 10, 10 have (0, 0, 3, 1):
one is larger, and two of the three 10s stay, which are the groups 1 and 3; group 4 is dropped.

The host knows no counts, so all five kernels are launched every time, and return at once if the
count is within the capacity and no group was put off. In the last three, a thread has a word of
candidates, and takes its lowest set bit until none is left. A dropped group writes x to a bfloat16
residual; a float32 residual already holds x since the selection. In a direct sketch made by the
dense pass, the residual holds the quantization error: there x is restored, and groups that were put
off are sent, see :mod:`.direct`.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from .digits import PUT_OFF, SECOND, THIRDS, TIES, prefix
from .direct import Direct, arguments, stride
from .gather import load_groups
from .jit import cdiv, jit, row_stride, tl, torch_call
from .narrow import narrow
from .scalar import load_words, lowest_bit, magnitude, narrow_finite, popcount
from .scratch import buffer
from .symbols import clips, restore, send

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
def _load(grad, residual, cells, unit, key, there, n, LANES: tl.constexpr):
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
            x, _j, _inside, _symbol = _load(grad, residual, cells, unit, key, there, n, LANES)
            size = tl.max(magnitude(x), 1)
            if DIGITS == 2:
                there = there & ((size >> SECOND) == known)
                tl.atomic_add(row + THIRDS + (size & 0x1FF), 1, mask=there, sem="relaxed")
            else:
                ties += (there & (size == known)).to(tl.int32)
            word &= word - 1
    if DIGITS == 3:
        tl.store(row + TIES + p, tl.sum(ties, 0))


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
        late = tl.load(row + PUT_OFF)
    if not (over | (late > 0)):
        return
    taken = tl.zeros([], tl.int32)
    for first in range(0, p, WORDS):
        before = first + tl.arange(0, WORDS)
        taken += tl.sum(tl.load(row + TIES + before, mask=before < p, other=0), 0)
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
                x, _j, _inside, _symbol = _load(
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
                    x, j, inside, symbol = _load(grad, residual, cells, unit, key, goes, n, LANES)
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


def cleared_histograms(grad: Tensor, index: Tensor, layout: Hashable) -> Tensor:
    """The counters of :func:`trim`; the selection counts groups put off in :func:`put_off_of`."""
    W, words = index.shape
    programs = min(cdiv(_PROGRAMS, W), cdiv(words, _WORDS))
    shape = (W, TIES.value + programs)
    histograms = buffer("histograms", shape, torch.int32, grad.device, layout)
    torch_call(Tensor.zero_, histograms)
    return histograms


def put_off_of(histograms: Tensor) -> Tensor:
    """``[W]`` int32, number of groups that the selection put off."""
    return histograms[:, PUT_OFF.value]


def trim(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
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
        grad, residual: as :func:`select` left them; threshold: of the selection.
        index: ``[W, words]``, bitmaps, updated.
        counts: ``[W, 4]``; the first column is the number of marked groups. With cells, the third
            and fourth become the counts of the groups that stay.
        lanes: elements of a group.
        layout: the layout whose scratch buffers to use.
        histograms: from :func:`cleared_histograms`; default: new ones.
        direct: cells that the selection wrote; cells of dropped groups are cleared.
    """
    W, numel = grad.shape
    if capacity >= cdiv(numel, lanes):
        return
    if histograms is None:
        histograms = cleared_histograms(grad, index, layout)
    programs = histograms.shape[1] - TIES.value
    candidates = buffer("candidates", tuple(index.shape), torch.int32, grad.device, layout)
    given = (
        grad, residual, index, candidates, counts, histograms, *arguments(direct), numel,
        index.shape[1], capacity, grad.stride(0), row_stride(residual), index.stride(0),
        candidates.stride(0), counts.stride(0), histograms.stride(0), stride(direct),
    )  # fmt: skip
    options = {
        "LANES": lanes, "WORDS": _WORDS, "num_warps": _WARPS,
    }  # fmt: skip
    narrow(threshold, given, lanes=lanes, words=index.shape[1], rows=W, programs=programs)
    for digits in range(2, 4):
        count_kernel[(programs, W)](*given, DIGITS=digits, **options)
    drop_kernel[(programs, W)](*given, **options)
