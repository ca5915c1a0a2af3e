"""Direct sketches, which the dense pass makes at once, against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.kernel_cases import Cases, kernels
from support.sketch_kernels import BF16, F32, Problem, check, problem
from support.sync import synchronizing_raises
from tagc.ops import ABOVE, KEPT, SATURATED
from tagc.ops.sketch import SketchLayout

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
CASES = case = Cases()


def direct(symbol: str, grad, residual, n: int, mode: str, **options: Any) -> Problem:
    """A problem whose groups have a cell each."""
    p = problem(symbol, grad, residual, n, mode, **options)
    groups = p.layout.groups
    p.layout = SketchLayout(
        numel=n, symbol=p.layout.symbol, keys=groups, hashes=1, partition=groups
    )
    assert p.layout.direct
    return p


def owed(p: Problem) -> Tensor:
    assert p.residual is not None
    return p.residual


@case("put off, and nothing goes")
def _(device):
    p = direct("int8x4", F32, F32, 2400, "usual", W=3)
    p.capacity = p.layout.groups - 1
    for x in (p.grad, owed(p)):
        x[1, ::4] = -0.0
    p.grad[2, ::64] = 2.0**100
    done = check(p, device)
    assert (done["counts"][:, ABOVE] == done["counts"][:, KEPT]).all()
    assert done["counts"][2, SATURATED] >= 2400 // 64


@case("put off: not to be found again from cell and residual")
def _(device):
    """Elements of 2**24 steps and more, and -0, in groups that stay and in others that go."""
    for symbol, mode in (("int8x4", "overflow"), ("int16x2", "usual"), ("int32x1", "overflow")):
        p = direct(symbol, F32, F32, 2400, mode)
        lanes = p.layout.symbol.lanes
        for x in (p.grad, owed(p)):
            x[:, 5 :: 8 * lanes] = -0.0
        p.grad[0, 3 :: 4 * lanes] = p.step[0] * (2.0**25 + 2.0**3)
        p.grad[0, 2 :: 12 * lanes] = p.step[0] * 1.5 * 2.0**30
        done = check(p, device)
        assert done["counts"][0, ABOVE] > p.capacity
        assert done["counts"][0, SATURATED] > 0


@case("several tiles of a program, and ties")
def _(device):
    with mock.patch.multiple(kernels("trim"), _PROGRAMS=2, _WORDS=4):
        p = direct("int8x4", BF16, F32, 12_000, "usual", W=1)
        p.grad.clamp_(-1, 1)
        owed(p).zero_()
        p.threshold.fill_(1.0)
        done = check(p, device)
        assert done["counts"][0, ABOVE] > p.capacity


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(
    __file__, "put off, and nothing goes", edges=True
)

gpu = pytest.mark.gpu


@gpu
def test_nothing_waits_for_the_device():
    p = direct("int8x4", BF16, F32, 4096, "overflow")
    check(p, "cuda")
    with synchronizing_raises():
        for _ in range(2):
            kernels("ops").encode(
                torch.zeros(2, 4096, dtype=BF16, device="cuda"),
                torch.zeros(2, 4096, device="cuda"),
                *torch.ones(2, 2, device="cuda"),
                torch.zeros(1, dtype=torch.int32, device="cuda"),
                torch.empty(2, p.layout.index_words, dtype=torch.int32, device="cuda"),
                torch.empty(2, p.layout.cells, dtype=torch.int32, device="cuda"),
                torch.empty(2, 4, dtype=torch.int32, device="cuda"),
                layout=p.layout, levels=p.levels, capacity=p.capacity,
            )  # fmt: skip


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
