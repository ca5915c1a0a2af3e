"""Rows of a damaged message stay apart."""

from __future__ import annotations

import numpy as np
import torch

from support import matrix_cases, oracle
from tagc.ops import get_ops

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")


def test_rows_of_a_damaged_matrix_stay_apart():
    """A row whose scale is infinite leaves those that follow it as they are."""
    case = matrix_cases.make_case((4, 5), 1, (1, 1, torch.float32, None), np.random.default_rng(0))
    message, _ = matrix_cases.quantize(CPU, case, 0.0)
    message = message.clone()
    base, columns, _ = case.layout.head
    first = base + columns
    # An infinite scale is 0x7F8 as a row's byte and the base.
    message[0, 0], message[0, first] = 0x7F8 - 200, 200 + (100 << 8) + (100 << 16) + (100 << 24)
    outs = [matrix_cases.dequantize(ops, message, case.layout) for ops in (CPU, REFERENCE)]
    assert oracle.same_values(*outs)
    assert outs[0].view(4, 5)[1:].isfinite().all()
    assert not outs[0].view(4, 5)[0].isfinite().any()
