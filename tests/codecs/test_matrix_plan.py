"""The plan of codec ``matrix``: neighbours of one shape share a call, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tagc.codecs.matrix import MatrixPlan
from tagc.ops import get_ops
from tagc.ops.matrix import MatrixLayout


def plan_of(*layouts: MatrixLayout) -> MatrixPlan:
    ones = (1,) * len(layouts)
    return MatrixPlan(layouts=layouts, matrices_of_parameters=ones, warmup_steps=0, feedback=None)


A, B, C = (MatrixLayout(rows=r, columns=n) for r, n in ((5, 70), (6, 33), (6, 70)))
MIXED = plan_of(A, A, B, C, A, B, B, B)


# Among 2 owners, A and C have as many rows.
@pytest.mark.parametrize(
    ("owners", "counts"), [(1, [2, 1, 1, 1, 3]), (2, [2, 1, 2, 3]), (5, [2, 1, 1, 1, 3])]
)
def test_matrices_of_several_shapes_are_sent_like_one_after_the_other(owners, counts):
    ops, (plan, _) = get_ops("cpu", "cpu"), MIXED.cut(owners)
    assert [run.count for run in plan.matrices.runs] == counts
    numel = sum(layout.numel for layout in plan.layouts)
    generator = torch.Generator().manual_seed(owners)
    grad, residual = (torch.randn(3, numel, generator=generator) for _ in range(2))
    message, left = torch.zeros(3, plan.words, dtype=torch.int32), residual.clone()
    out = torch.full((3, numel), torch.nan)
    ops.quantize_matrix(grad, left, message, layout=plan.matrices, average=0.0)
    ops.dequantize_matrix(message[:, None], out, layout=plan.matrices, divisor=1)
    column = word = 0
    for layout in plan.layouts:
        columns = slice(column, column := column + layout.numel)
        words = slice(word, word := word + layout.words)
        one, its = torch.zeros(3, layout.words, dtype=torch.int32), residual[:, columns].clone()
        ops.quantize_matrix(grad[:, columns], its, one, layout=layout, average=0.0)
        back = torch.empty(3, layout.numel)
        ops.dequantize_matrix(one[:, None], back, layout=layout, divisor=1)
        assert torch.equal(message[:, words], one)
        assert torch.equal(left[:, columns], its)
        assert torch.equal(out[:, columns], back)
    assert (column, word) == (numel, plan.words)
