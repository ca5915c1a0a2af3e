"""A sample of codec ``sketch`` for timing."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codecs.sample import ROWS, Sample, TimedSteps
from tagc.codecs.selection.capacity import capacity_for
from tagc.codecs.selection.quantization_step import quantization_step
from tagc.codecs.selection.support import Support
from tagc.codecs.sketch.plan import SketchPlan
from tagc.ops import COUNTS
from tagc.ops.sketch import plan_layout


def sample_sketch(plan: SketchPlan, s: Sample) -> TimedSteps:
    """Steps that encode and decode ``s.grad``."""
    groups = -(-s.columns // plan.symbol.lanes)
    capacity = capacity_for(plan.target, groups)
    layout = plan_layout(s.columns, plan.symbol, groups if plan.shared else ROWS * capacity)
    threshold = s.threshold(plan.symbol.lanes, plan.target)
    step = quantization_step(threshold, plan.symbol, plan.levels)
    index, counts = s.empty(ROWS, layout.index_words), s.empty(ROWS, COUNTS)
    cells = s.empty(ROWS, layout.cells)
    seed, out = torch.zeros(1, dtype=torch.int32, device=s.grad.device), torch.empty_like(s.grad[0])
    support: Support | None = None
    places: Tensor | None = None

    def encode() -> None:
        nonlocal places
        s.ops.encode(
            s.grad, s.residual, threshold, step, seed, index, cells, counts,
            layout=layout, levels=plan.levels, capacity=capacity,
            support=None if support is None else support.current,
        )  # fmt: skip
        if support is not None:
            places = support.collect(cells, sent)[0].clone()

    sent = cells
    if plan.shared:
        encode()
        support = Support(layout, capacity, plan.target, ROWS, s.grad.device)
        support.current.copy_(index[:1, : layout.words].expand(ROWS, -1))
        sent = s.empty(ROWS, capacity)
        index = torch.cat([support.current, index[:, layout.words :]], 1)
    total, stats = torch.empty_like(sent[0]), s.empty(2)

    def decode() -> None:
        torch.sum(sent, 0, dtype=total.dtype, out=total)  # decoding may overwrite it
        table = total
        if support is not None:
            assert places is not None
            table = support.spread(total, places)
        s.ops.decode(index, table, step[:1], seed, out, None, stats, layout=layout, divisor=ROWS)

    return encode, decode
