"""Trim: where more groups than the capacity are marked, keep the largest, ties to the lower index.

The size of the last group to stay is found digit by digit, from the top, by histograms of 11, 10
and 10 bits of the (31-bit) float pattern; each pass looks only at groups that agree with the digits
found so far. A fourth pass counts, per program, the groups of exactly that size, so that the fifth
can give the places left for them to the lower indices, and clear the other bits.

Worked example (2-bit digits, capacity 3): sizes 0b0111, 0b0110, 0b0001, 0b0110, 0b0110. The top
digits 01, 01, 00, 01, 01 have histogram (1, 4, 0, 0): the third largest is among the 4 in bin 01.
Their low digits 11, 10, 10, 10 have (0, 0, 3, 1): one is larger, two of the three 10s stay, which
are the groups 1 and 3; groups 2 and 4 go.

Nothing is known on the host: all five kernels are launched every time, and leave at once where
the count is within the capacity. Otherwise each reads the bitmap and the marked groups. A group
that goes leaves x in a bfloat16 residual; a float32 residual holds it since the selection.
"""

from __future__ import annotations

from collections.abc import Hashable

import triton
from torch import Tensor

from .jit import jit, tl
from .marked import load_marked
from .scalar import magnitude, narrow_finite, word_of
from .scratch import buffer

# Most elements and words at once.
_TILE, _WORDS = 2048, 16
_WARPS = 4
_PROGRAMS = 256
# Where the counts of ties, one place per program, follow the three histograms of a row.
_TIES = 2048 + 1024 + 1024
# Per pass: bits below the digits found so far, bits below this digit, largest digit, where its
# histogram starts. The last one counts ties.
_PASSES = ((31, 20, 0x7FF, 0), (20, 10, 0x3FF, 2048), (10, 0, 0x3FF, 3072), (0, 0, 0, _TIES))
# Arguments whose alignment makes no difference.
_PLAIN = ["words", "capacity", "counts", "index_stride", "counts_stride", "histogram_stride"]


@jit
def _pick(histogram, need, BINS: tl.constexpr):
    """Bin of the ``need``-th largest, and how many of that bin are among the ``need`` largest."""
    count = tl.load(histogram + tl.arange(0, BINS))
    larger = tl.sum(count, 0) - tl.cumsum(count, 0)  # [BINS], falls to 0
    digit = tl.sum((larger >= need).to(tl.int32), 0)
    return digit, need - tl.max(tl.where(larger < need, larger, 0), 0)


@jit
def _prefix(histogram, capacity, digits):
    """The first ``digits`` of the last size to stay, and how many groups that have them stay."""
    prefix = tl.zeros([], tl.int32)
    need = tl.maximum(capacity, 1)
    if digits > 0:
        prefix, need = _pick(histogram, need, 2048)
    if digits > 1:
        digit, need = _pick(histogram + 2048, need, 1024)
        prefix = (prefix << 10) | digit
    if digits > 2:
        digit, need = _pick(histogram + 3072, need, 1024)
        prefix = (prefix << 10) | digit
    return prefix, need - (capacity == 0).to(tl.int32)


@jit(do_not_specialize=[*_PLAIN, "level", "known_shift", "shift", "largest", "base"])
def count_kernel(
    grad, residual, index, counts, histograms, n, words, capacity,
    grad_stride, residual_stride, index_stride, counts_stride, histogram_stride,
    level, known_shift, shift, largest, base,
    LANES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    if tl.load(counts + d * counts_stride) <= capacity:
        return
    row = histograms + d * histogram_stride
    known, _places = _prefix(row, capacity, level)
    row += base + tl.where(level == 3, tl.program_id(0), 0)
    index += d * index_stride
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    share = tl.cdiv(tl.cdiv(words, WORDS), tl.num_programs(0)) * WORDS
    begin = tl.program_id(0).to(tl.int64) * share
    for first in range(begin, tl.minimum(begin + share, words), WORDS):
        marked, x, _j, _inside = load_marked(grad, residual, index, first, n, words, LANES, WORDS)
        size = tl.max(magnitude(x), 2)  # [WORDS, 32]
        same = marked & ((size >> known_shift) == known)
        tl.atomic_add(row + ((size >> shift) & largest), 1, mask=same, sem="relaxed")


@jit(do_not_specialize=_PLAIN)
def drop_kernel(
    grad, residual, index, counts, histograms, n, words, capacity,
    grad_stride, residual_stride, index_stride, counts_stride, histogram_stride,
    LANES: tl.constexpr, WORDS: tl.constexpr, PROGRAMS: tl.constexpr, TIES: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(1).to(tl.int64)
    if tl.load(counts + d * counts_stride) <= capacity:
        return
    row = histograms + d * histogram_stride
    last, places = _prefix(row, capacity, 3)
    p = tl.arange(0, PROGRAMS)
    taken = tl.sum(tl.load(row + TIES + p, mask=p < tl.program_id(0), other=0), 0)
    index += d * index_stride
    grad += d * grad_stride
    if residual is not None:
        residual += d * residual_stride
    share = tl.cdiv(tl.cdiv(words, WORDS), tl.num_programs(0)) * WORDS
    begin = tl.program_id(0).to(tl.int64) * share
    w = tl.arange(0, WORDS)
    for first in range(begin, tl.minimum(begin + share, words), WORDS):
        marked, x, j, inside = load_marked(grad, residual, index, first, n, words, LANES, WORDS)
        size = tl.max(magnitude(x), 2)  # [WORDS, 32]
        tie = tl.reshape((marked & (size == last)).to(tl.int32), [WORDS * 32])
        turn = tl.reshape(taken + tl.cumsum(tie, 0) - tie, [WORDS, 32])
        taken += tl.sum(tie, 0)
        stays = marked & ((size > last) | ((size == last) & (turn < places)))
        # Several warps read the words; none may be late.
        tl.debug_barrier()
        tl.store(index + first + w, word_of(stays), mask=w < words - first)
        if residual is not None and residual.dtype.element_ty != tl.float32:
            goes = inside & tl.expand_dims(stays == 0, 2)
            place = residual + first * (32 * LANES) + j
            tl.store(place, narrow_finite(x, residual.dtype.element_ty), mask=goes)


def trim(
    grad: Tensor,
    residual: Tensor | None,
    index: Tensor,
    counts: Tensor,
    *,
    lanes: int,
    capacity: int,
    layout: Hashable,
) -> None:
    """Clear bits of ``index`` until every destination keeps at most ``capacity`` groups.

    Args:
        grad, residual: as :func:`select` left them.
        index: ``[W, words]``, bitmaps, updated.
        counts: ``[W, 4]``, of which the first column says how many groups are marked.
        lanes: elements of a group.
        layout: whose scratch buffers to use.
    """
    W, numel = grad.shape
    if capacity >= triton.cdiv(numel, lanes):
        return
    wide = min(_WORDS, _TILE // (32 * lanes))
    programs = min(_PROGRAMS, triton.cdiv(index.shape[1], wide))
    histograms = buffer("histograms", (W, _TIES + _PROGRAMS), counts.dtype, grad.device, layout)
    histograms.zero_()
    arguments = (
        grad, residual, index, counts, histograms, numel, index.shape[1], capacity,
        grad.stride(0), 0 if residual is None else residual.stride(0), index.stride(0),
        counts.stride(0), histograms.stride(0),
    )  # fmt: skip
    shape = {"LANES": lanes, "WORDS": wide}
    options = {"num_warps": _WARPS, "enable_fp_fusion": False}
    for level, digit in enumerate(_PASSES):
        count_kernel[(programs, W)](*arguments, level, *digit, **shape, **options)
    drop_kernel[(programs, W)](*arguments, PROGRAMS=_PROGRAMS, TIES=_TIES, **shape, **options)
