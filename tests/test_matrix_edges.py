"""Both CPU implementations of quantized matrices where signs of zeros and infinities decide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tagc.matrix import MatrixLayout
from tagc.ops import get_ops

both = pytest.mark.parametrize("name", ["cpu", "reference"])
LAYOUT = MatrixLayout(rows=3, columns=16, group=8)


def codes_of(name: str, grad: Tensor) -> list[int]:
    """The first row's codes."""
    message = torch.empty(1, LAYOUT.words, dtype=torch.int32)
    get_ops("cpu", name).quantize_matrix(
        grad.reshape(1, -1), None, message, layout=LAYOUT, average=0.0
    )
    word = int(message[0, sum(LAYOUT.head)])
    return [word & 15, word >> 4 & 15]


@both
def test_a_group_of_minus_zeros_is_negative(name):
    grad = torch.ones(3, 16)
    grad[0, :8] = -0.0
    assert codes_of(name, grad) == [8, 0]


@both
def test_a_quotient_that_overflows_is_the_largest_of_its_group(name):
    # The fifth column's scale is a quarter of the others', so its 2**127 is 2**129 in units of it.
    grad = torch.full((3, 16), 2.0**64)
    grad[:, 4] *= 0.25
    grad[0, 0], grad[0, 4] = torch.finfo(torch.float32).max, -(2.0**127)
    assert codes_of(name, grad) == [12, 0]
