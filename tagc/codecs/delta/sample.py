"""Codec ``delta``, to be timed."""

from __future__ import annotations

from dataclasses import replace

import torch

from tagc.codecs.delta.plan import DeltaPlan
from tagc.codecs.matrix.plan import MatrixPlan
from tagc.codecs.matrix.sample import sample_matrix
from tagc.codecs.quantized.sample import sample_quantized
from tagc.codecs.sample import Sample, Steps


def sample_delta(plan: DeltaPlan, s: Sample) -> Steps:
    """Subtracting a copy and encoding; decoding and adding."""
    copy, change = torch.zeros_like(s.grad), torch.empty_like(s.grad, dtype=torch.float32)
    wide = replace(s, grad=change)
    encode, decode = (
        sample_matrix(plan.code, wide)
        if isinstance(plan.code, MatrixPlan)
        else sample_quantized(plan.code, wide)
    )

    def subtract_and_encode() -> None:
        change.copy_(s.grad).sub_(copy)
        encode()

    def decode_and_add() -> None:
        decode()
        copy.add_(change)

    return subtract_and_encode, decode_and_add
