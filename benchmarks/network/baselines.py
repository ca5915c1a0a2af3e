"""What tagc is compared with: collectives for FSDP2 without gloo's waste, FSDP1's hook for bf16.

gloo's own reduce-scatter sends twice what it must; an all-to-all and a local sum do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    LowPrecisionState,
    reduce_scatter_hook,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class _Allocate:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllToAllReduceScatter(_Allocate, ReduceScatter):
    """Reduce-scatter (AVG or SUM) as an all-to-all and a sum in fp32 on the owner.

    Args:
        wire: dtype that travels; None is the buffer's.
    """

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self._wire = wire

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(f"this reduce-scatter averages or sums, it cannot do {op}")
        sent = input_tensor if self._wire is None else input_tensor.to(self._wire)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        total = received.view(group.size(), -1).sum(0, dtype=torch.float32)
        if op == dist.ReduceOp.AVG:
            total /= group.size()
        output_tensor.copy_(total)


class CastAllGather(_Allocate, AllGather):
    """All-gather of fp32 parameters that travel in ``wire``: every rank computes in fp32, with
    parameters rounded to ``wire`` (its own, too, so that all ranks agree)."""

    def __init__(self, wire: torch.dtype) -> None:
        self._wire = wire

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        gathered = torch.empty_like(output_tensor, dtype=self._wire)
        dist.all_gather_into_tensor(gathered, input_tensor.to(self._wire), group=group)
        output_tensor.copy_(gathered)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor) -> None:
    """FSDP1's ``bf16_compress_hook`` in the parts that a CPU has.

    torch's own ends with ``Tensor.record_stream``, which fails on CPU tensors (torch 2.13).
    """
    grad.data = grad.data.to(torch.bfloat16)
    output.data = output.data.to(torch.bfloat16)
    reduce_scatter_hook(state, grad, output)
    output.data = output.data.to(state.parameter_type)
