"""How residuals are stored, in every implementation alike."""

from __future__ import annotations

import pytest
import torch

from support import oracle
from tagc.codecs.feedback import Residual
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


def residual_of(values: torch.Tensor, dtype: torch.dtype, ops: str = "cpu") -> Residual:
    rows, columns = values.shape
    new = Residual(rows, columns, dtype, get_ops("cpu", ops), values.device)
    with new.opened() as wide:
        wide.copy_(values)
    return new


@by_ops
def test_in_8_bits_half_a_step_is_lost_once(name):
    values = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    values[1, :256] *= 1e-30
    values[2] = 0
    residual = residual_of(values, torch.int8, name)
    read = residual.read()
    for block, kept in zip(values.split(256, 1), read.split(256, 1), strict=True):
        step = block.abs().amax(1, keepdim=True) / 127
        assert ((block - kept).abs() <= (0.5 + 2**-7) * step).all()
    assert (read != values).any()
    with residual.opened():
        pass
    # What was rounded stays as it is, whoever looks at it.
    assert oracle.same_bits(residual.read(), read)


def test_in_8_bits_implementations_agree():
    values = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    one, other = (residual_of(values, torch.int8, name).read() for name in ("cpu", "reference"))
    assert oracle.same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_are_opened_alone_and_zeros_are_owed_nothing(dtype):
    residual = residual_of(torch.full((3, 300), 127.0), dtype)
    with residual.opened(slice(1, 2)) as row:
        assert row.shape == (1, 300)
        row.mul_(2)
    assert residual.read().unique(dim=1).flatten().tolist() == [127, 254, 127]
    residual.zero_()
    assert not residual.read().any()


def test_an_error_leaves_what_is_owed_as_it_was():
    residual = residual_of(torch.full((1, 300), 127.0), torch.int8)

    def fail():
        with residual.opened() as wide:
            wide.zero_()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert (residual.read() == 127).all()
