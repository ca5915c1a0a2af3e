"""The sketch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.bitmap import from_bitmap, to_bitmap
from tagc.ops.fingerprint import MASK, fmix32
from tagc.ops.reference.select import grouped, rounded, select_groups
from tagc.ops.sketch import SketchLayout
from tagc.ops.symbols import pack, unpack

_GOLDEN, _STRIDE = 0x9E3779B9, 0x7F4A7C15


def positions(keys: Tensor, seed: Tensor, layout: SketchLayout) -> Tensor:
    """Cells of each key.

    Cell ``i`` of key ``k`` lies in partition ``i`` at ``(fmix32(k ^ salt_i) * partition) >> 32``,
    with ``salt_i = fmix32(seed * 0x9E3779B9 + (i + 1) * 0x7F4A7C15)``.

    Args:
        keys: ``[K]`` int64.
        seed: ``[1]`` int32.

    Returns:
        ``[K, hashes]`` int64.
    """
    if layout.direct:
        return keys[:, None]
    i = torch.arange(layout.hashes, device=keys.device)
    salt = fmix32((((seed.to(torch.int64) & MASK) * _GOLDEN) + (i + 1) * _STRIDE) & MASK)
    spread = (fmix32(keys[:, None] ^ salt) * layout.partition) >> 32
    return i * layout.partition + spread


def encode(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    step: Tensor,
    seed: Tensor,
    index: Tensor,
    cells: Tensor,
    counts: Tensor,
    support: Tensor | None = None,
    *,
    layout: SketchLayout,
    levels: int,
    capacity: int,
) -> None:
    """Accumulate, select, quantize and sketch one segment for every destination.

    Per destination ``d`` with ``x = float32(grad[d]) + float32(residual[d])``:

    1. Without a ``support``, a group is selected if its largest ``|x|`` is at least
       ``threshold[d]``. If more than ``capacity`` groups are selected, the largest are kept,
       ties to the lower index. A capacity for all groups selects every non-zero group. With a
       ``support``, exactly its groups are selected, even zero ones; threshold and capacity do
       not matter.
    2. A group with a non-finite ``x`` is never selected, its residual stays as it was, and the
       poison word of the destination is set.
    3. A kept element sends ``q = rint(clip(x / step[d], -levels, levels))`` and leaves
       ``x - q * step[d]`` in the residual. Every other element leaves ``x``. Both are rounded
       to nearest even in the residual's dtype (finite stays finite).

    Args:
        grad: ``[W, n]`` float32, bfloat16 or float16.
        residual: ``[W, n]`` float32 or bfloat16, updated in place; None for no feedback.
        threshold: ``[W]`` float32, positive.
        step: ``[W]`` float32 powers of two, so that ``q * step`` and ``x / step`` are exact
            and ``x - q * step`` is exact in float32 for ``|x| < 2**24 * step``.
        seed: ``[1]`` int32, the hash seed of this step.
        index: ``[W, index_words]`` int32, written: bitmaps (bit ``g % 32`` of word ``g // 32``
            for group ``g``), then the poison word (0 or 1).
        cells: ``[W, cells]`` int32, written.
        counts: ``[W, 4]`` int32, written: finite groups above the threshold, finite groups
            that are not all zero, groups kept, kept groups with a clipped element.
        support: ``[W, words]`` int32 bitmaps (bits past the last group are ignored), or None.
    """
    for d in range(grad.shape[0]):
        x = grad[d].float() if residual is None else grad[d].float() + residual[d].float()
        groups = grouped(x, layout.symbol.lanes)
        kept, finite, seen = select_groups(groups, threshold[d], capacity)
        if support is not None:
            kept = from_bitmap(support[d], layout.groups) & finite

        scaled = groups * (1.0 / step[d])
        q = scaled.clamp(-levels, levels).round()
        clipped = (scaled.abs() > levels).any(-1) & kept
        symbols, sent = pack(q.nan_to_num(0.0).to(torch.int64), layout.symbol), q * step[d]
        if residual is not None:
            left = torch.where(kept[:, None], groups - sent, groups).flatten()[: layout.numel]
            stay = (~finite)[:, None].expand_as(groups).flatten()[: layout.numel]
            residual[d] = torch.where(stay, residual[d], rounded(left, residual.dtype))

        index[d, : layout.words] = to_bitmap(kept)
        index[d, layout.words] = (~finite).any()
        insert(symbols, index[d, : layout.words], seed, cells[d], layout=layout)
        counts[d] = torch.stack([*seen, kept.sum(), clipped.sum()])


def decode(
    index: Tensor,
    cells: Tensor,
    step: Tensor,
    seed: Tensor,
    out: Tensor,
    residual: Tensor | None,
    stats: Tensor,
    *,
    layout: SketchLayout,
    divisor: int,
) -> None:
    """OR the bitmaps, peel the summed cells and write this rank's shard of the gradient.

    Elements are ``float32(sum of q) * step / divisor``, rounded to ``out``'s dtype; absent
    groups are zero. If any poison word is set, all of ``out`` is NaN. Groups that peeling
    cannot recover are zero and counted, and their estimate is added to ``residual``: the mean
    over their cells of the cell's remaining sum, shared equally among the cell's remaining
    keys, and not divided by ``divisor``.

    Args:
        index: ``[W, index_words]`` int32, the index that each rank sent to this one.
        cells: ``[cells]`` int32, the sum over ranks; may be overwritten.
        step: ``[1]`` float32, the quantization step of this shard.
        seed: ``[1]`` int32, as in :func:`encode`.
        out: ``[n]`` float32, bfloat16 or float16, written.
        residual: ``[n]`` this rank's residual of its own shard, or None.
        stats: ``[2]`` int32, written: groups in the union, groups unresolved.
    """
    present = from_bitmap(index[:, : layout.words], layout.groups).any(0)
    poisoned = index[:, layout.words].any()
    symbols, stuck, left, degree = _peel(cells, present, seed, layout)
    values = _values(symbols, step, layout)
    out.copy_((values / torch.full_like(values, divisor)).flatten()[: layout.numel])
    out.masked_fill_(poisoned, torch.nan)
    stats[0], stats[1] = present.sum(), stuck.sum()
    if residual is None:
        return
    keys = stuck.nonzero().flatten()
    lanes, device = layout.symbol.lanes, out.device
    estimate = torch.zeros(layout.groups, lanes, dtype=torch.float32, device=device)
    share = torch.zeros(keys.numel(), lanes, dtype=torch.float32, device=device)
    for column in positions(keys, seed, layout).unbind(-1):
        share += _values(left[column], step, layout) / degree[column, None]
    estimate[keys] = share / torch.full_like(share, layout.hashes)
    add = estimate.flatten()[: layout.numel]
    lost = stuck[:, None].expand_as(estimate).flatten()[: layout.numel]
    more = rounded(residual.float() + add, residual.dtype)
    residual.copy_(torch.where(lost, more, residual))


def _values(symbols: Tensor, step: Tensor, layout: SketchLayout) -> Tensor:
    """Symbols to float32 elements, ``[..., lanes]``."""
    return unpack(symbols, layout.symbol).float() * step


def select(
    x: Tensor,
    threshold: Tensor,
    bitmap: Tensor,
    counts: Tensor,
    *,
    layout: SketchLayout,
    capacity: int,
) -> None:
    """Mark the groups of every row that :func:`encode` would keep without a support.

    Args:
        x: ``[R, n]`` float32 or bfloat16.
        threshold: ``[R]`` float32, positive.
        bitmap: ``[R, words]`` int32, written.
        counts: ``[R, 4]`` int32, written as by :func:`encode`; the last column is 0.
    """
    for r in range(x.shape[0]):
        groups = grouped(x[r].float(), layout.symbol.lanes)
        kept, _, seen = select_groups(groups, threshold[r], capacity)
        bitmap[r] = to_bitmap(kept)
        counts[r] = torch.stack([*seen, kept.sum(), torch.zeros_like(seen[0])])


def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    """Sketch given symbols: ``cells`` get the sums over the groups in ``index``.

    Args:
        symbols: ``[groups]`` int32; entries of absent groups are ignored.
        index: ``[words]`` int32 bitmap.
        seed: ``[1]`` int32.
        cells: ``[cells]`` int32, written.
    """
    keys = from_bitmap(index, layout.groups).nonzero().flatten()
    cells.zero_()
    where = positions(keys, seed, layout)
    cells.index_add_(0, where.flatten(), symbols[keys][:, None].expand_as(where).flatten())


def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
    """Recover the summed symbols of the groups in ``index``.

    Returns:
        ``[groups]`` int32 symbols (0 where absent or unresolved) and ``[groups]`` bool, True
        where a present group could not be recovered.
    """
    symbols, stuck, _, _ = _peel(cells, from_bitmap(index, layout.groups), seed, layout)
    return symbols, stuck


def _peel(
    cells: Tensor, present: Tensor, seed: Tensor, layout: SketchLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Peel in rounds: every cell with one key left yields that key, which leaves all its cells.

    Returns:
        Symbols ``[groups]``; unresolved ``[groups]`` bool; the remaining sums of the cells
        ``[cells]``; and the number of keys left in each cell ``[cells]``.
    """
    keys = present.nonzero().flatten()
    where = positions(keys, seed, layout)  # [K, hashes]
    left = cells.clone()
    degree = torch.zeros(layout.cells, dtype=torch.int64, device=cells.device)
    degree.index_add_(0, where.flatten(), torch.ones_like(where).flatten())
    value = torch.zeros(keys.numel(), dtype=torch.int32, device=cells.device)
    todo = torch.ones(keys.numel(), dtype=torch.bool, device=cells.device)
    while True:
        alone = (degree[where] == 1) & todo[:, None]  # [K, hashes]
        found = alone.any(-1)
        if not found.any():
            break
        source = where[found].gather(1, alone[found].to(torch.int64).argmax(-1, keepdim=True))
        value[found] = left[source.flatten()]
        gone = where[found]
        left.index_add_(0, gone.flatten(), -value[found][:, None].expand_as(gone).flatten())
        degree.index_add_(0, gone.flatten(), -torch.ones_like(gone).flatten())
        todo &= ~found
    symbols = torch.zeros(layout.groups, dtype=torch.int32, device=cells.device)
    symbols[keys] = value
    stuck = torch.zeros(layout.groups, dtype=torch.bool, device=cells.device)
    stuck[keys[todo]] = True
    return symbols, stuck, left, degree
