"""Operators launch on the device of their tensors, not on the one that happens to be current."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch

from support.kernel_cases import kernels

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

# Of each operator that launches, the tensor whose device it takes.
TENSORS = {
    "encode": "grad",
    "decode": "cells",
    "insert": "cells",
    "peel": "cells",
    "quantize": "grad",
    "dequantize": "out",
    "quantize_matrix": "grad",
    "dequantize_matrix": "out",
    "select": "x",
    "measure_exact": "new",
    "encode_exact": "new",
    "decode_exact": "rows",
    "pack_exponents": "rows",
    "unpack_exponents": "rows",
    "undo_lag": "out",
    "steer": "state",
    "fingerprint": "x",
    "put_dense": "message",
    "sum_dense": "message",
    "quantize_and_put": "grad",
    "dequantize_and_sum": "out",
}


def test_all_that_launch_are_here():
    names = set(kernels("ops").__all__) - {
        "release",
        "compiling_only",
        "recorded",
        "current_stream",
    }
    assert {name for name in names if not name.startswith("prepare")} == set(TENSORS)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_launches_on_the_device_of(name, by_name):
    operator = getattr(kernels("ops"), name)
    parameters = inspect.signature(operator).parameters.values()
    placed = [] if by_name else [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: p.name for p in parameters if p.name not in placed}
    with (
        mock.patch.object(torch.cuda, "device_of", side_effect=RuntimeError("there")) as device_of,
        pytest.raises(RuntimeError, match="there"),
    ):
        operator(*placed, **named)
    # Every argument is its own name.
    device_of.assert_called_once_with(TENSORS[name])
