"""The operators of sparse messages."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.bitmap import from_bitmap, to_bitmap
from tagc.ops.packed import KEPT_GROUPS, POISON, PackedLayout, index_of, values_of
from tagc.ops.reference.blocks import dequantize_rows, pack_codes, pack_scales, quantize_rows
from tagc.ops.reference.select import grouped, rounded, select_groups
from tagc.ops.symbols import wrap_int32


def pack(
    grad: Tensor,
    residual: Tensor | None,
    threshold: Tensor,
    message: Tensor,
    counts: Tensor,
    *,
    layout: PackedLayout,
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.pack`."""
    index, values = index_of(message, layout), values_of(message, layout)
    for r in range(grad.shape[0]):
        x = grad[r].float() if residual is None else grad[r].float() + residual[r].float()
        groups = grouped(x, layout.group)
        kept, finite, (above, nonzero) = select_groups(groups, threshold[r], layout.capacity)
        write_index(to_bitmap(kept)[None], index[r : r + 1], layout=layout)
        message[r, POISON], message[r, KEPT_GROUPS] = (~finite).any(), kept.sum()

        keys = kept.nonzero().flatten()
        stream = torch.zeros(layout.capacity, layout.group, dtype=torch.float32, device=x.device)
        stream[: keys.numel()] = groups[keys]
        scale, q, left = quantize_rows(stream.view(1, -1), layout.values)
        parts = [pack_scales(scale, layout.values), pack_codes(q, layout.values)]
        values[r] = torch.cat(parts, dim=-1)[0]
        counts[r] = torch.stack([above, nonzero, kept.sum(), torch.zeros_like(above)])
        if residual is None:
            continue
        owed = groups.clone()
        owed[keys] = left.view(-1, layout.group)[: keys.numel()]
        stay = (~finite)[:, None].expand_as(groups).flatten()[: layout.numel]
        owed = rounded(owed.flatten()[: layout.numel], residual.dtype)
        residual[r] = torch.where(stay, residual[r], owed)


def unpack(message: Tensor, out: Tensor, *, layout: PackedLayout, divisor: int) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.unpack`."""
    total = torch.zeros(layout.groups, layout.group, dtype=torch.float32, device=out.device)
    bitmap = message.new_empty(message.shape[0], layout.bitmap_words)
    read_index(index_of(message, layout), bitmap, layout=layout)
    for r in range(message.shape[0]):
        keys = from_bitmap(bitmap[r], layout.groups).nonzero().flatten()
        values = dequantize_rows(values_of(message[r], layout), layout.values)
        total[keys] += values.view(-1, layout.group)[: keys.numel()]
    total = total.flatten()[: layout.numel]
    # Divided by a tensor: by a number, CUDA multiplies with the reciprocal.
    out.copy_(total / torch.full_like(total, divisor))
    out.masked_fill_(message[:, POISON].any(), torch.nan)


def select(
    x: Tensor, threshold: Tensor, bitmap: Tensor, counts: Tensor, *, layout: PackedLayout
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.select`."""
    for r in range(x.shape[0]):
        groups = grouped(x[r].float(), layout.group)
        kept, _, seen = select_groups(groups, threshold[r], layout.capacity)
        bitmap[r] = to_bitmap(kept)
        counts[r] = torch.stack([*seen, kept.sum(), torch.zeros_like(seen[0])])


def write_index(bitmap: Tensor, index: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.write_index`."""
    if not layout.low_bits:
        index.copy_(bitmap)
        return
    low, entries = layout.low_bits, 32 // layout.low_bits
    for r in range(bitmap.shape[0]):
        keys = from_bitmap(bitmap[r], layout.groups).nonzero().flatten()
        parts = torch.zeros(layout.low_words * entries, dtype=torch.int64, device=keys.device)
        parts[: keys.numel()] = keys & ((1 << low) - 1)
        shift = low * torch.arange(entries, device=keys.device)
        index[r, : layout.low_words] = wrap_int32((parts.view(-1, entries) << shift).sum(-1))
        high = torch.zeros(layout.high_words * 32, dtype=torch.bool, device=keys.device)
        high[(keys >> low) + torch.arange(keys.numel(), device=keys.device)] = True
        index[r, layout.low_words :] = to_bitmap(high)


def read_index(index: Tensor, bitmap: Tensor, *, layout: PackedLayout) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.read_index`."""
    if not layout.low_bits:
        bitmap.copy_(index)
        return
    low, entries = layout.low_bits, 32 // layout.low_bits
    shift = low * torch.arange(entries, device=index.device, dtype=torch.int32)
    for r in range(index.shape[0]):
        high = from_bitmap(index[r, layout.low_words :], layout.high_words * 32)
        ones = high.nonzero().flatten()
        parts = (index[r, : layout.low_words, None] >> shift) & ((1 << low) - 1)
        i = torch.arange(ones.numel(), device=index.device)
        keys = ((ones - i) << low) | parts.flatten()[: ones.numel()]
        present = torch.zeros(layout.groups, dtype=torch.bool, device=index.device)
        present[keys] = True
        bitmap[r] = to_bitmap(present)


def prepare_packed(
    layout: PackedLayout, gradient: torch.dtype, residual: torch.dtype | None
) -> None:
    """See :meth:`tagc.ops.packed.PackedOps.prepare_packed`; nothing to compile."""
