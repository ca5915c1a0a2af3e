"""The reference divides by tensors: by a Python number CUDA multiplies with the reciprocal, which
rounds twice, and the reference would be another one there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tagc.ops import get_ops
from tagc.selfcheck import every_call
from tagc.selfcheck.calls import OPERATORS
from tagc.selfcheck.cases import case_of


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


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_division_is_by_a_number(operator):
    counted = Divisions()
    for call in every_call():
        if call.operator == operator:
            case = case_of(call)
            with counted:
                case.run(get_ops("cpu", "reference"), Tensor.clone)
    divides = {
        "dequantize",
        "dequantize_matrix",
        "decode",
        "quantize_matrix",
        "undo_lag",
        "steer",
    }
    assert (counted.count > 0) == (operator in divides)


@pytest.mark.parametrize("divide", [lambda x: x / 3, lambda x: x.div_(3), lambda x: x / 0.5])
def test_the_check_can_fail(divide):
    with pytest.raises(AssertionError, match=r"aten\.div"), Divisions():
        divide(torch.ones(4))
