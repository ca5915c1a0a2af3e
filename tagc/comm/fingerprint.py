"""A number that tells whether a tensor is still what it was, without a copy of it."""

from __future__ import annotations

import torch
from torch import Tensor

# So that what the sums need for a moment is small beside what is looked at.
_ELEMENTS = 1 << 20


def fingerprint(values: Tensor) -> Tensor:
    """Two sums over the bits of ``values`` ``[n]``, plain and weighted by place, int64 ``[2]``,
    modulo ``2**64``. What changes a few elements, or all of them alike, changes one of them; no
    protection against intent."""
    bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for start in range(0, bits.numel(), _ELEMENTS):
        part = bits[start : start + _ELEMENTS].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=values.device)
        total += torch.stack([part.sum(), part.mul_(place).sum()])
    return total
