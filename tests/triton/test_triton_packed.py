"""The Triton operators of sparse packing against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from support import oracle
from support.kernel_cases import Cases, kernels
from support.packed_kernels import (
    BF16,
    F16,
    F32,
    MODES,
    Problem,
    check,
    check_select,
    problem,
)
from tagc.ops.packed import HEADER, POISON, plan_packed

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


CASES = case = Cases()

# n, mode, bits, group, block, low bits, gradient, residual, output, divisor
GRID = [
    (700, "usual", 8, 1, 256, None, F32, F32, F32, 3),
    (511, "overflow", 4, 1, 32, 0, BF16, F32, BF16, 2),
    (1031, "overflow", 8, 2, 64, 1, BF16, BF16, F32, 1),
    (1027, "usual", 4, 4, 128, 2, F16, None, F16, 2),
    (2050, "overflow", 8, 4, 32, 4, F32, BF16, BF16, 5),
    (2047, "all above", 4, 4, 512, 2, F16, F32, F32, 7),
    (1500, "room for all", 8, 2, 256, 1, BF16, BF16, BF16, 3),
    (3001, "overflow", 4, 4, 32, 1, F32, F32, F32, 2),
    (900, "overflow", 8, 1, 1024, 8, BF16, None, F32, 3),
    (640, "usual", 8, 1, 64, 16, F32, BF16, F32, 1),
    (300, "room for all", 4, 1, 64, 0, F16, BF16, F32, 6),
    (333, "all above", 8, 2, 4096, 4, F32, None, BF16, 3),
]
for row in GRID:
    label = " ".join(str(v).removeprefix("torch.") for v in row)

    @case(label)
    def _(device, row=row):
        n, mode, bits, group, block, low, grad, residual, dtype, divisor = row
        p = problem(
            n, mode, bits=bits, group=group, block=block, low=low, grad=grad, residual=residual
        )
        counts = check(p, device, dtype=dtype, divisor=divisor)["counts"]
        if mode == "overflow":
            assert (counts[:, 2] == p.layout.capacity).all()
            assert (counts[:, 0] > p.layout.capacity).all()


for mode in MODES:

    @case(f"tiny sizes, {mode}")
    def _(device, mode=mode):
        for i, n in enumerate((1, 3, 31, 33, 65)):
            check(problem(n, mode, group=(1, 2, 4)[i % 3], residual=BF16, R=1), device)
            check(problem(n, mode, low=(1, 2, 4)[i % 3], R=1), device)


@case("nothing at all")
def _(device):
    for low in (0, 2):
        layout = replace(plan_packed(0, capacity=0), low_bits=low)
        p = Problem(torch.zeros(2, 0), torch.zeros(2, 0), torch.ones(2), layout)
        assert check(p, device)["message"][:, :HEADER].tolist() == [[0, 0]] * 2


@case("aligned rows")
def _(device):
    for group, grad, residual in ((1, F32, F32), (4, BF16, BF16), (2, F32, BF16)):
        p = problem(1024, "overflow", group=group, grad=grad, residual=residual)
        check(p, device, aligned=True, divisor=4)


@case("non-finite groups are not kept, and poison the message")
def _(device):
    for residual, low in ((F32, 2), (BF16, 0), (None, 1)):
        p = problem(600, "usual", group=2, low=low, residual=residual, R=3)
        p.grad[0, 3], p.grad[0, 400], p.grad[0, 599] = float("nan"), float("inf"), -float("inf")
        done = check(p, device)
        assert done["message"][:, POISON].tolist() == [1, 0, 0]
        assert done["out"].isnan().all()
        if p.residual is not None:
            bad = torch.tensor([2, 3, 400, 401, 598, 599])
            assert torch.equal(done["residual"][0, bad], p.residual[0, bad])


@case("ties stay in the order of the index")
def _(device):
    for n, group, capacity in ((700, 1, 137), (700, 4, 1), (2080, 2, 3)):
        p = problem(n, "usual", group=group, residual=BF16, R=1)
        assert p.residual is not None
        p.grad.fill_(2.0)
        p.residual.zero_()
        p.grad[0, n // 2] = -3.0
        p.threshold.fill_(1.0)
        p.layout = plan_packed(n, capacity=capacity, group=group)
        done = check(p, device)
        assert done["counts"][0].tolist() == [n // group, n // group, capacity, 0]
        kept = oracle.bits_of(
            check_select(p.grad, p.threshold, p.layout, device)[0].numpy(), n // group
        )
        assert kept == sorted([*range(capacity - 1), n // 2 // group])


@case("a program that trims several tiles")
def _(device):
    with mock.patch.multiple(kernels("trim"), _PROGRAMS=2, _WORDS=4):
        p = problem(5000, "overflow", group=4, low=2, grad=BF16, residual=BF16, R=1)
        p.grad.clamp_(-1, 1)
        assert p.residual is not None
        p.residual.zero_()
        p.threshold.fill_(0.5)
        assert check(p, device)["counts"][0, 0] > p.layout.capacity


@case("a residual stays finite")
def _(device):
    for residual in (BF16, F32):
        p = problem(300, "all above", residual=residual, R=1)
        p.grad[0, ::2], p.grad[0, 1::6] = 3.4e38, -3.4e38
        p.residual = torch.zeros_like(p.grad).to(residual)
        done = check(p, device)
        assert done["residual"].isfinite().all()
        assert done["residual"].abs().max() > 3.3e38


@case("numbers next to zero, zeros of both signs")
def _(device):
    for grad, residual in ((F32, F32), (BF16, BF16), (F16, F32), (F32, BF16), (F32, None)):
        p = problem(160, "all above", grad=grad, residual=residual, R=1)
        tiny = 2.0**-24 if grad == F16 else 2.0**-133
        p.grad[0] = (torch.arange(160) - 80) * tiny
        p.grad[0, ::7] = -0.0
        if p.residual is not None:
            p.residual[0] = (torch.arange(160) % 7) * 2.0**-133
            p.residual[0, ::7] = -0.0
        p.threshold.fill_(2.0**-131)
        check(p, device)


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

FEW = (
    "640 usual 8 1 64 16 float32 bfloat16 float32 1",
    "aligned rows",
)
MORE = ("2050 overflow 8 4 32 4 float32 bfloat16 bfloat16 5",)
outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, *FEW, more=MORE)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
