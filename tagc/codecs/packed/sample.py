"""Codec ``packed``, to be timed."""

from __future__ import annotations

import torch

from tagc.codecs.packed.plan import PackedPlan
from tagc.codecs.sample import ROWS, Sample, Steps
from tagc.codecs.selection.capacity import capacity_for
from tagc.ops import COUNTS
from tagc.ops.packed import plan_packed


def sample_packed(plan: PackedPlan, s: Sample) -> Steps:
    """Encoding and decoding ``s.grad``."""
    old = plan.layout
    groups = -(-s.columns // old.group)
    layout = plan_packed(
        s.columns,
        capacity=capacity_for(plan.target, groups),
        group=old.group,
        bits=old.values.bits,
        block=old.values.block,
    )
    message, out = s.empty(ROWS, layout.words), torch.empty_like(s.grad[0])
    counts, threshold = s.empty(ROWS, COUNTS), s.threshold(layout.group, plan.target)

    def encode() -> None:
        s.ops.pack(s.grad, s.residual, threshold, message, counts, layout=layout)

    def decode() -> None:
        s.ops.unpack(message, out, layout=layout, divisor=ROWS)

    return encode, decode
