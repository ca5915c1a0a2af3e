"""The Triton operator that steers thresholds against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.kernel_cases import Cases, check_margins, kernels, placed, same
from support.sync import synchronizing_raises
from tagc.ops import reference
from tagc.ops.thresholds import SIDE, STATES, STEP, THRESHOLD

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
CASES = case = Cases()


def check(segments: int, destinations: int, device: str, *, aligned: bool = False) -> None:
    """Some steps: counts about the target, far from it, and none at all."""
    rng = np.random.default_rng(segments)
    shape = segments, destinations
    state = torch.ones(STATES, *shape)
    state[SIDE] = 0
    state[THRESHOLD] = torch.from_numpy(np.exp2(rng.uniform(-60, 60, shape))).float()
    target = torch.from_numpy(rng.uniform(1, 2000, segments)).float()
    most = torch.from_numpy(rng.choice([1, 2, 8], segments)).float()
    scale = torch.from_numpy(rng.choice([0, 0.25, 2], segments)).float()
    numbers = target, most, scale
    there = placed(state, device, aligned)
    for step in range(4):
        counts = rng.integers(0, 3000, (*shape, 4), dtype=np.int32)
        counts[..., 3] //= rng.choice([1, 20, 400, 5000], shape).astype(np.int32)
        counts[rng.random(shape) < 0.1] = 0
        counts[rng.random(shape) < 0.1, 0] = 0
        counts[rng.random(shape) < 0.05] = 2**31 - 1
        found = torch.from_numpy(counts)
        reference.steer(found, *numbers, state)
        given = placed(found, device, aligned), *(placed(x, device, aligned) for x in numbers)
        kernels("ops").steer(*given, there)
        same(f"step {step}", there, state)
        check_margins(there)


for row in [(1, 1), (2, 8), (3, 5), (7, 37)]:

    @case(f"{row[0]} by {row[1]}")
    def _(device, row=row):
        check(row[0], row[1], device)


@case("a full program, and a thread more")
def _(device):
    check(8, 16, device, aligned=True)
    check(43, 3, device, aligned=True)


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
    __file__, "3 by 5", "at the bounds"
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
