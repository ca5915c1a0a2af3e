"""Copies of a rank's tensors on the host, and the sums that their digest is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tagc.checkpoint.sums import sums_of


class Copies(NamedTuple):
    """Contiguous copies on the host, by name.

    Tensors of a GPU are copied to pinned memory, which nothing waits for: synchronize before you
    read them. So the GPU never holds copies of more than one tensor.

    Attributes:
        tensors: the copies.
        sums: :func:`tagc.checkpoint.sums.sums_of` of each.
    """

    tensors: dict[str, Tensor]
    sums: dict[str, Tensor]

    def add(self, name: str, tensor: Tensor, *, shared: bool) -> None:
        """Add a copy of a tensor.

        Args:
            shared: whether something else may change the tensor. If not, a tensor on the CPU is
                taken as it is.
        """
        packed = tensor.detach().contiguous()
        self.sums[name] = _on_host(sums_of(packed))
        self.tensors[name] = _on_host(packed, shared=shared and packed.data_ptr() == tensor.data_ptr())


def _on_host(tensor: Tensor, *, shared: bool = False) -> Tensor:
    if tensor.device.type == "cpu" and not shared:
        return tensor
    pinned = tensor.is_cuda
    out = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return out.copy_(tensor, non_blocking=pinned)
