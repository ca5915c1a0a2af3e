"""The Triton operator that steers thresholds against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.kernel_cases import Cases, kernels, same
from support.sync import synchronizing_raises
from tagc.ops import reference
from tagc.ops.thresholds import SIDE, STATES, STEP, THRESHOLD

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
CASES = case = Cases()


@case("at the bounds")
def _(device):
    """Of threshold and exponent, from both sides; a step is never 0."""
    state = torch.ones(STATES, 1, 4)
    state[THRESHOLD, 0] = torch.tensor([2.0**-96, 2.0**96, 2.0**-95, 2.0**95])
    state[SIDE, 0] = torch.tensor([-1.0, 1, 1, -1])
    counts = torch.tensor([[[0, 9, 0, 0], [5000, 9000, 100, 0]] * 2], dtype=torch.int32)
    numbers = torch.tensor([100.0]), torch.tensor([1.0]), torch.tensor([2.0**-20])
    there = state.to(device, copy=True)
    for _ in range(8):
        reference.steer(counts, *numbers, state)
        kernels("ops").steer(counts.to(device), *(x.to(device) for x in numbers), there)
        same("state", there, state)
    assert set(state[THRESHOLD].flatten().tolist()) == {2.0**-96, 2.0**96}
    assert (state[STEP] > 0).all()


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(
    __file__, "at the bounds", edges=True
)

gpu = pytest.mark.gpu


@gpu
def test_nothing_waits_for_the_device():
    counts = torch.ones(2, 4, 4, dtype=torch.int32, device="cuda")
    numbers = torch.ones(3, 2, device="cuda")
    state = torch.ones(STATES, 2, 4, device="cuda")
    kernels("ops").steer(counts, *numbers, state)
    with synchronizing_raises():
        kernels("ops").steer(counts, *numbers, state)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
