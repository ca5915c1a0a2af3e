"""What operators share: the selection of groups, what stays in a residual, and sums of messages."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(x: Tensor, size: int) -> Tensor:
    """``[..., n]`` to ``[..., groups, size]``, padded with zeros."""
    groups = -(-x.shape[-1] // size)
    pad = groups * size - x.shape[-1]
    return torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (groups, size))


def select_groups(
    groups: Tensor, threshold: Tensor, capacity: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Select the groups of a row to keep.

    Args:
        groups: ``[groups, elements]`` float32.
        threshold: scalar.

    Returns:
        ``[groups]`` bool, kept; ``[groups]`` bool, finite; and the numbers of groups above the
        threshold and of finite groups that are not all zero.
    """
    finite = groups.isfinite().all(-1)
    size = groups.abs().amax(-1).masked_fill(~finite, 0.0)
    above = finite & (size >= threshold)
    kept = size > 0
    if capacity < len(groups):
        # The largest; a stable order gives ties to the lower index.
        order = torch.argsort(size.masked_fill(~above, -1.0), descending=True, stable=True)
        kept = torch.zeros_like(above)
        kept[order[:capacity]] = True
        kept &= above
    return kept, finite, (above.sum(), (size > 0).sum())


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in the dtype of a residual; finite values stay finite."""
    largest = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(dtype)


def keep(residual: Tensor, left: Tensor, average: float, stay: Tensor) -> None:
    """Update a residual with what is ``left`` of it, except where it should ``stay``."""
    if average:
        kept, fresh = (left.new_tensor(share) for share in (average, 1 - average))
        left = kept * residual.float() + fresh * left
    residual.copy_(torch.where(stay, residual, rounded(left, residual.dtype)))


def add_up(values: Tensor, out: Tensor, divisor: int, add: bool) -> None:
    """Write or add the sums of ``values`` ``[K, R, numel]`` over ``R``, in order, divided."""
    total, *others = values.unbind(1)
    for row in others:
        total = total + row
    # Divided by a tensor: by a number, CUDA multiplies with the reciprocal.
    x = total / torch.full_like(total, divisor)
    out.copy_(out.float() + x if add else x)


def patterns(x: Tensor) -> Tensor:
    """The bit patterns of 16-bit floats, from 0 on."""
    return x.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
