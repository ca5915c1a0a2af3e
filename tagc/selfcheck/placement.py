"""Where tensors lie, by which kernels differ: whether rows begin where 16 bytes do, and how far
apart they are.

In training gradients and residuals are aligned where the parameters' sizes are; messages lie beside
those of other segments, as they will.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

# What outputs hold before, and what lies beside rows; of floats NaN.
GARBAGE = 0x5A5A5A5A
# Elements before and after a row that does not begin where 16 bytes do.
_BEFORE, _AFTER = 3, 5


def copied(x: Tensor, device: torch.device) -> Tensor:
    """A copy of its own, with nothing between rows."""
    return x.to(device, copy=True).contiguous()


def shifted(x: Tensor, device: torch.device) -> Tensor:
    """A copy within a wider buffer; of what is just a number or a few, a plain copy."""
    if x.shape[-1] < 2 or (x.dtype == torch.float32 and x.ndim == 1 and x.shape[-1] <= 16):
        return copied(x, device)
    return _within(x, device, _BEFORE, _BEFORE + x.shape[-1] + _AFTER)


def beside_others(x: Tensor, device: torch.device, *, before: int) -> Tensor:
    """A copy of a message within wider rows, after so many words; of others, a plain copy."""
    if x.dtype != torch.int32 or x.ndim < 2:
        return copied(x, device)
    # Rows lie an even number of words apart that no access of 16 bytes divides.
    width = before + x.shape[-1]
    return _within(x, device, before, width + (2 - width) % 4)


def _within(x: Tensor, device: torch.device, before: int, width: int) -> Tensor:
    garbage = torch.nan if x.dtype.is_floating_point else GARBAGE
    wide = torch.full((*x.shape[:-1], width), garbage, dtype=x.dtype, device=device)
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def is_intact(x: Tensor) -> bool:
    """Whether what lies beside a placed tensor is what it was."""
    wide, before = x._base, x.storage_offset()
    if wide is None:
        return True
    beside = torch.cat([wide[..., :before], wide[..., before + x.shape[-1] :]], dim=-1)
    return bool((beside.isnan() if x.dtype.is_floating_point else beside == GARBAGE).all())


# Each is given a tensor and its device.
PLACEMENTS = {
    "aligned": copied,
    "not aligned": shifted,
    "messages in wider rows": partial(beside_others, before=4),
    "messages in wider rows, not aligned": partial(beside_others, before=5),
}
