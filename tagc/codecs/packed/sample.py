"""Codec ``packed``, to be timed."""

from __future__ import annotations

import torch

from tagc.codecs.packed.plan import PackedPlan
from tagc.codecs.sample import ROWS, Sample, Steps
from tagc.codecs.selection.capacity import capacity_for
from tagc.ops import COUNTS
from tagc.ops.packed import index_of, plan_packed


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
    support = None
    if plan.shared:
        support = s.empty(ROWS, layout.bitmap_words)
        s.ops.select(s.grad.float(), threshold, support, counts, layout=layout)
        s.ops.write_index(support, index_of(message, layout), layout=layout)

    def encode() -> None:
        s.ops.pack(s.grad, s.residual, threshold, support, message, counts, layout=layout)

    def decode() -> None:
        own = None if support is None else support[0]
        s.ops.unpack(message, own, out, layout=layout, divisor=ROWS)
        if support is not None:
            s.ops.read_index(index_of(message, layout), support, layout=layout)

    return encode, decode
