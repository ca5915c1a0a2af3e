"""Codec ``dense``, to be timed."""

from __future__ import annotations

from dataclasses import replace

import torch

from tagc.codecs.dense.codec import elements_of
from tagc.codecs.dense.plan import DensePlan
from tagc.codecs.sample import ROWS, Sample, Steps


def sample_dense(plan: DensePlan, s: Sample) -> Steps:
    """Encoding and decoding ``s.grad``."""
    plan = replace(plan, numel=s.columns)
    message, out = s.empty(ROWS, plan.words), torch.empty_like(s.grad[0])
    elements = elements_of(message, plan)
    return (
        lambda: elements.copy_(s.grad),
        lambda: out.copy_(elements.sum(0, dtype=torch.float32) / ROWS),
    )
