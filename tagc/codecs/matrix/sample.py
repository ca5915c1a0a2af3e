"""Codec ``matrix``, to be timed."""

from __future__ import annotations

from dataclasses import replace

import torch

from tagc.codecs.matrix.plan import MatrixPlan
from tagc.codecs.sample import ROWS, Sample, Steps


def sample_matrix(plan: MatrixPlan, s: Sample) -> Steps:
    """Encoding and decoding ``s.grad``, as one matrix that is about square."""
    columns = 1 << (s.columns.bit_length() // 2)
    layout = replace(plan.layouts[0], rows=s.columns // columns, columns=columns)
    grad = s.grad[:, : layout.numel]
    residual = None if s.residual is None else s.residual[:, : layout.numel]
    message, out = s.empty(ROWS, layout.words), torch.empty_like(s.grad[:1, : layout.numel])
    return (
        lambda: s.ops.quantize_matrix(grad, residual, message, layout=layout, average=s.average),
        lambda: s.ops.dequantize_matrix(message[None], out, layout=layout, divisor=ROWS),
    )
