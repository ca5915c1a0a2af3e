"""Selection of groups, and rounding to a residual's dtype."""

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
    kept = _keep_largest(above, size, capacity) if capacity < groups.shape[0] else size > 0
    return kept, finite, (above.sum(), (size > 0).sum())


def _keep_largest(selected: Tensor, size: Tensor, capacity: int) -> Tensor:
    """At most ``capacity`` of the selected groups: the largest, ties to the lower index."""
    order = torch.argsort(size.masked_fill(~selected, -1.0), descending=True, stable=True)
    kept = torch.zeros_like(selected)
    kept[order[:capacity]] = True
    return kept & selected


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in the dtype of a residual; finite values stay finite."""
    largest = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.clamp(-largest, largest), x).to(dtype)
