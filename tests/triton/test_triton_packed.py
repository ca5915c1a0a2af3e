"""The Triton operators of sparse packing against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
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
    check,
    check_select,
    problem,
)
from tagc.ops.packed import plan_packed

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


CASES = case = Cases()


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


@case("a program that counts as many sizes in one bin as it may")
def _(device):
    for size in (1.0, 3.9):
        with mock.patch.object(kernels("trim"), "_PROGRAMS", 1):
            p = problem(2 * 32 * 1024 - 37, "overflow", grad=BF16, residual=None, R=1)
            p.grad.fill_(size)
            p.grad[0, -9:] = 5.0
            p.threshold.fill_(1.0)
            assert check(p, device)["counts"][0, 0] == p.layout.numel


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

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, edges=True)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
