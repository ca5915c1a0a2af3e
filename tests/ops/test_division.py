"""The reference divides by tensors: by a Python number CUDA multiplies with the reciprocal, which
rounds twice, and the reference would be another one there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.trials import one_of_each
from tagc.ops import get_ops


class Divisions(TorchDispatchMode):
    """Counts divisions of floats by tensors, and refuses those by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            assert isinstance(args[1], Tensor), f"{func} by {args[1]!r}"
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.call.operator)
def test_no_division_is_by_a_number(case):
    with Divisions() as counted:
        case.run(get_ops("cpu", "reference"), Tensor.clone)
    divides = {
        "dequantize",
        "dequantize_matrix",
        "decode",
        "quantize_matrix",
        "undo_lag",
        "steer",
        "sum_dense",
    }
    assert (counted.count > 0) == (case.call.operator in divides)


@pytest.mark.parametrize("divide", [lambda x: x / 3, lambda x: x.div_(3), lambda x: x / 0.5])
def test_the_check_can_fail(divide):
    with pytest.raises(AssertionError, match=r"aten\.div"), Divisions():
        divide(torch.ones(4))
