"""The Triton operator that undoes the lag of error feedback against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support import oracle
from support.kernel_cases import Cases, kernels, placed, same
from support.sync import synchronizing_raises
from tagc.ops import reference

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = case = Cases()


@case("in place")
def _(device):
    rng = np.random.default_rng(3)
    decoded, last = oracle.values((3000,), rng).float(), oracle.values((3000,), rng).float()
    weights, results = torch.tensor([0.5, 0.5]), []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        x, sent = placed(decoded, where, True), placed(last, where, True)
        ops.undo_lag(x, sent, x, placed(weights, where, True))
        same("sent", sent, decoded)
        results.append(x)
    same("out", results[1], results[0])


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(
    __file__, "in place", edges=True
)

gpu = pytest.mark.gpu


@gpu
def test_nothing_waits_for_the_device():
    decoded, sent, out = (torch.ones(5000, device="cuda") for _ in range(3))
    weights = torch.tensor([0.5, 0.5], device="cuda")
    kernels("ops").undo_lag(decoded, sent, out, weights)
    with synchronizing_raises():
        kernels("ops").undo_lag(decoded, sent, out, weights)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
