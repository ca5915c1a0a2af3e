"""Places tensors in memory as in training: with rows aligned to 16 bytes or not, and rows apart.
Kernels differ by that.

In training, gradients and residuals are aligned if the parameters' sizes are. Messages lie beside
those of other segments at any word.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

# What outputs hold before a call, and what lies beside rows; NaN for floats.
GARBAGE = 0x5A5A5A5A
# Elements before and after a row that is not aligned to 16 bytes.
_BEFORE, _AFTER = 3, 5


def copied(x: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy."""
    return x.to(device, copy=True).contiguous()


def shifted(x: Tensor, device: torch.device) -> Tensor:
    """A copy within a wider buffer; a plain copy if the tensor holds only a few numbers."""
    if x.shape[-1] < 2 or (x.dtype == torch.float32 and x.ndim == 1 and x.shape[-1] <= 16):
        return copied(x, device)
    return _within(x, device, _BEFORE, _BEFORE + x.shape[-1] + _AFTER)


def beside_others(x: Tensor, device: torch.device, *, before: int) -> Tensor:
    """A copy of a message within wider rows, after ``before`` words; of others, a plain copy."""
    if x.dtype != torch.int32 or x.ndim < 2:
        return copied(x, device)
    # The distance between rows is a multiple of 2 words, but not of 4 words (16 bytes).
    width = before + x.shape[-1]
    return _within(x, device, before, width + (2 - width) % 4)


def _within(x: Tensor, device: torch.device, before: int, width: int) -> Tensor:
    garbage = torch.nan if x.dtype.is_floating_point else GARBAGE
    wide = torch.full((*x.shape[:-1], width), garbage, dtype=x.dtype, device=device)
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def is_intact(x: Tensor) -> bool:
    """Whether the elements beside a placed tensor are unchanged."""
    wide, before = x._base, x.storage_offset()
    if wide is None:
        return True
    beside = torch.cat([wide[..., :before], wide[..., before + x.shape[-1] :]], dim=-1)
    return bool((beside.isnan() if x.dtype.is_floating_point else beside == GARBAGE).all())


# Functions of a tensor and its device.
PLACEMENTS = {
    "aligned": copied,
    "not aligned": shifted,
    "messages in wider rows": partial(beside_others, before=4),
    "messages in wider rows, not aligned": partial(beside_others, before=5),
}
