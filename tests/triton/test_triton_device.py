"""Operators launch on the device of their tensors, not on the one that happens to be current."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch

from support.kernel_cases import kernels
from tagc.selfcheck.calls import OPERATORS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_launches_on_the_device_of_a_tensor(name, by_name):
    operator = getattr(kernels("ops"), name)
    parameters = inspect.signature(operator).parameters.values()
    # Every argument is its own name.
    placed = [] if by_name else [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: p.name for p in parameters if p.name not in placed}
    with (
        mock.patch.object(torch.cuda, "device_of", side_effect=RuntimeError("there")) as device_of,
        pytest.raises(RuntimeError, match="there"),
    ):
        operator(*placed, **named)
    (given,) = device_of.call_args.args
    annotation = inspect.signature(operator, eval_str=True).parameters[given].annotation
    assert annotation is torch.Tensor
