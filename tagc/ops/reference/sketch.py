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
    *,
    layout: SketchLayout,
    levels: int,
    capacity: int,
    support: Tensor | None = None,
) -> None:
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
    for r in range(x.shape[0]):
        groups = grouped(x[r].float(), layout.symbol.lanes)
        kept, _, seen = select_groups(groups, threshold[r], capacity)
        bitmap[r] = to_bitmap(kept)
        counts[r] = torch.stack([*seen, kept.sum(), torch.zeros_like(seen[0])])


def insert(
    symbols: Tensor, index: Tensor, seed: Tensor, cells: Tensor, *, layout: SketchLayout
) -> None:
    keys = from_bitmap(index, layout.groups).nonzero().flatten()
    cells.zero_()
    where = positions(keys, seed, layout)
    cells.index_add_(0, where.flatten(), symbols[keys][:, None].expand_as(where).flatten())


def peel(
    cells: Tensor, index: Tensor, seed: Tensor, *, layout: SketchLayout
) -> tuple[Tensor, Tensor]:
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
