"""Dtypes of the model, and of mixed precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """Of the model, and a mixed precision policy.

    Attributes:
        refused: words of the error that policies which compress raise.
        refused_changes: likewise, those which send changes of parameters.
    """

    model: torch.dtype = torch.float32
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    refused: str = ""
    refused_changes: str = ""

    @property
    def mixed(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param, reduce_dtype=self.reduce)

    @property
    def reduced(self) -> torch.dtype:
        return self.reduce or self.param or self.model


DTYPES: dict[str, Dtype] = {
    "fp32": Dtype(),
    "bf16": Dtype(param=BF16, reduce=BF16),
    "bf16, reduced in fp32": Dtype(param=BF16, reduce=F32),
    "reduced in bf16": Dtype(reduce=BF16),
    "fp16": Dtype(param=F16, reduce=F16),
    "fp16, reduced in fp32": Dtype(param=F16, reduce=F32),
    "model in bf16": Dtype(model=BF16),
    "model in fp64": Dtype(model=F64, refused="reduces gradients of torch.float64"),
    "model in fp64, reduced in fp32": Dtype(
        model=F64, reduce=F32, refused_changes="gathers parameters of torch.float64"
    ),
}
