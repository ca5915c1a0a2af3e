"""How residuals are stored, in every implementation alike."""

from __future__ import annotations

import pytest
import torch

from tagc.ops import get_ops
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

by_ops = pytest.mark.parametrize("name", ["reference", "cpu"])
SEED = torch.zeros(1, dtype=torch.int32)


@by_ops
@pytest.mark.parametrize("value", [3.4e38, -3.4e38])
def test_a_finite_gradient_never_makes_a_bfloat16_residual_infinite(name, value):
    """Rounded to nearest, 3.4e38 is infinite in bfloat16, and would poison every later step."""
    layout = plan_layout(4, SYMBOLS["int8x4"], 1)
    residual = torch.zeros(1, 4, dtype=torch.bfloat16)
    index = torch.empty(1, layout.index_words, dtype=torch.int32)
    cells = torch.empty(1, layout.cells, dtype=torch.int32)
    counts = torch.empty(1, 4, dtype=torch.int32)
    for grad in (torch.tensor([[value, 0, 0, 0]]), torch.zeros(1, 4)):
        get_ops("cpu", name).encode(
            grad, residual, torch.ones(1), torch.ones(1), SEED, index, cells, counts,
            layout=layout, levels=127, capacity=1,
        )  # fmt: skip
        assert index[0, -1] == 0
        assert residual[0, 0] == torch.finfo(torch.bfloat16).max * (1 if value > 0 else -1)


def test_a_zero_estimate_has_one_sign():
    """Added to a residual of -0, an estimate of 0 gives +0 everywhere."""
    n = 4096
    layout = plan_layout(n, SYMBOLS["int8x4"], 1)
    assert not layout.direct
    index = torch.full((1, layout.index_words), -1, dtype=torch.int32)
    index[:, -1] = 0
    left = []
    for name in ("reference", "cpu"):
        residual = torch.full((n,), -0.0)
        stats = torch.empty(2, dtype=torch.int32)
        get_ops("cpu", name).decode(
            index, torch.zeros(layout.cells, dtype=torch.int32), torch.ones(1), SEED,
            torch.empty(n), residual, stats, layout=layout, divisor=1,
        )  # fmt: skip
        assert stats[1] > 0
        left.append(residual.view(torch.int32))
    assert torch.equal(*left)
