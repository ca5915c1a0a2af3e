"""Copies of a rank's tensors on the host, and the sums that their digest is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tagc.checkpoint.sums import sums_of


class Copies(NamedTuple):
    """Contiguous copies on the host, by name.

    A GPU's tensors go to pinned memory one by one, so it holds one more tensor at most. Nothing
    waits for them: synchronize before you read the copies.

    Attributes:
        tensors: the copies.
        sums: :func:`tagc.checkpoint.sums.sums_of` of each.
    """

    tensors: dict[str, Tensor]
    sums: dict[str, Tensor]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor that nothing else changes. One on the CPU is taken as it is."""
        packed = tensor.detach().contiguous()
        self.sums[name] = _on_host(sums_of(packed))
        self.tensors[name] = _on_host(packed)


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    pinned = tensor.is_cuda
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return out.copy_(tensor, non_blocking=pinned)
