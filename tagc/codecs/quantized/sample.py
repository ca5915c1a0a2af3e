"""Codec ``quantized``, to be timed."""

from __future__ import annotations

from dataclasses import replace

import torch

from tagc.codecs.quantized.dither import seeds_of
from tagc.codecs.quantized.plan import QuantizedPlan
from tagc.codecs.sample import ROWS, Sample, Steps


def sample_quantized(plan: QuantizedPlan, s: Sample) -> Steps:
    """Encoding and decoding ``s.grad``."""
    layout = replace(plan.layout, numel=s.columns)
    message, out = s.empty(ROWS, layout.words), torch.empty_like(s.grad[:1])
    seeds = s.empty(len(s.grad)) if plan.dithered else None

    def encode() -> None:
        dither = seeds_of(s.grad) if plan.by_content else seeds
        s.ops.quantize(s.grad, s.residual, message, layout=layout, average=s.average, dither=dither)

    return (
        encode,
        lambda: s.ops.dequantize(message[None], out, layout=layout, divisor=ROWS),
    )
