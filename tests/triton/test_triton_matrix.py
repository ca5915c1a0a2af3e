"""The Triton operators of quantized matrices against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from support.kernel_cases import Cases, kernels
from support.matrix_kernels import (
    BF16,
    F16,
    F32,
    Problem,
    check,
    check_sum,
    filled,
    on_edge,
    problem,
    quantized,
    row_bytes,
)
from tagc.ops import reference
from tagc.ops.matrix import GROUP

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
LARGEST = torch.finfo(F32).max
LEAST = 2.0**-60  # mean of the largest column

CASES = case = Cases()


@case("additions in the order of the format")
def _(device):
    rng = np.random.default_rng(2)
    check(filled(on_edge(1.25, rng).T.contiguous()), device)
    rows = on_edge(1.0625, rng)
    found = row_bytes(check(filled(rows), device)["message"][0], filled(rows).layout)
    assert 8 < found.count(min(found)) < 56
    # Of each group one, which takes turns, so that all columns have the same scale.
    groups = torch.zeros(64, 64, 8)
    groups[torch.arange(64), :, torch.arange(64) % 8] = rows
    check(filled(groups.flatten(1), group=8), device)
    edge = np.float32(1.0625) / np.float32(0.624)
    while edge * np.float32(0.624) >= 1.0625:
        edge = np.nextafter(edge, np.float32(0))
    check(filled(on_edge(float(np.nextafter(edge, np.float32(2))), rng), bits=2), device)


@case("quotients next to integers")
def _(device):
    # Multiples of scales, whose quotients round to either side of the multiple.
    rng = np.random.default_rng(3)
    rows = torch.from_numpy(rng.integers(8, 16, (24, 1)) / 8)
    columns = torch.from_numpy(rng.choice([1, 0.75, 0.5, 0.375], 40))
    x = torch.from_numpy(rng.integers(-9, 10, (24, 40))) * rows * columns
    check(filled(x.float(), bits=2), device)


@case("rows longer than a program's tile")
def _(device):
    # Smaller tiles instead of rows of thousands.
    with (
        mock.patch.object(kernels("matrix_dequantize"), "_WORDS", 16),
        mock.patch.object(kernels("matrix_groups"), "_WARPS", 1),
        mock.patch.object(kernels("matrix_columns"), "_PROGRAMS", 1),
    ):
        for bits, group, columns in ((1, 1, 170), (2, 1, 300), (1, 8, 600)):
            check(problem(bits, group, 3, columns, BF16, BF16, D=1), device, dtype=BF16)


@case("rows longer than a program's registers")
def _(device):
    # Sums in several chunks of words, instead of rows of tens of thousands.
    with mock.patch("tagc.ops.matrix.SPAN", 256):
        for bits, group, columns in ((1, 1, 700), (2, 1, 513), (1, 8, 1030)):
            for average in (0.0, 0.9):
                p = problem(bits, group, 3, columns, F32, BF16, average, D=2)
                assert p.layout.row_words > p.layout.word_lanes
                p.grad[1, columns + 600 % columns] = float("nan")
                check(p, device)


@case("rows that send nothing keep the sign of a zero")
def _(device):
    for bits, group in ((1, 1), (2, 1), (1, 8)):
        x = torch.full((4, 40), -0.0)
        x[0], x[1, ::3], x[2, 1::2] = 1.0, 0.0, 1e-30
        check(filled(x, bits, group, residual=x.clone()), device)


@case("the largest column comes last")
def _(device):
    # More partial maxima than are read at once.
    x = torch.full((1, 4170), 2.0**-8)
    x[0, -1] = 1.0
    done = check(filled(x), device)
    assert done["message"][0, 0] == 8 * 127 - 136


@case("the largest row comes last, and a byte is at most 254")
def _(device):
    # One row has nearly all of the sums, so that it exceeds the mean of rows by far.
    x = torch.full((8192, 1), 2.0**-20)
    x[-1] = 1.0
    layout = replace(filled(x).layout, level=3.9)
    p = Problem(x.view(1, -1), None, layout)
    found = row_bytes(check(p, device)["message"][0], layout)
    assert found[-1] == 254 > found[0]


@case("rows that are not finite are NaN and spare their residual")
def _(device):
    for bits, group, residual, average in ((1, 1, F32, 0.0), (2, 1, BF16, 0.9), (1, 8, F32, 0.5)):
        p = problem(bits, group, 9, 50, F32, residual, average, D=1)
        assert p.residual is not None
        p.grad[0, :50] *= 1e6  # but for that, the largest row
        p.grad[0, 7], p.grad[0, 3 * 50], p.grad[0, -1] = float("nan"), float("inf"), -float("inf")
        p.grad[0, 5 * 50 + 4] = p.residual[0, 5 * 50 + 4] = 3e38  # a sum that overflows
        done = check(p, device)
        bad = torch.tensor([i in (0, 3, 5, 8) for i in range(9)]).repeat_interleave(50)
        assert torch.equal(done["out"].isnan(), bad)
        assert torch.equal(done["residual"][0, bad], p.residual[0, bad])
    p.grad[:] = float("nan")
    assert check(p, device)["out"].isnan().all()


@case("rows far above and below the others")
def _(device):
    for bits, group in ((1, 1), (2, 1), (1, 8)):
        x = problem(bits, group, 8, 70, D=1).grad.view(8, 70)
        x *= torch.tensor([1, 1e-3, 1e-30, 30, 1, 0.0, 1e-2, 1e-4])[:, None]
        p = filled(x, bits, group, residual=torch.zeros(8, 70, dtype=BF16))
        found = row_bytes(check(p, device)["message"][0], p.layout)
        assert found[2] == found[5] == 0
        assert len(set(found)) > 4


@case("numbers next to zero")
def _(device):
    for bits, group in ((1, 1), (2, 1), (1, 8)):
        for scale in (0.0, 1e-45, LEAST / 4, LEAST, 1.0):
            x = torch.full((3, 20), 1.0)
            x[2, 8] = -1e-42  # its code is negative all the same
            x[0, ::2] = -1.0
            x[1, 3] = -0.0
            done = check(filled(x * scale, bits, group), device)
            assert (done["message"][0, 0] == 0) == (scale < LEAST)


@case("the least mean that is sent")
def _(device):
    p = filled(torch.full((4, 16), LEAST))
    assert check(p, device)["message"][0, 0] != 0
    p.grad *= 0.874  # from 0.875 on it rounds to the next octave
    assert not check(p, device)["message"][0, 3:].any()


@case("the largest numbers")
def _(device):
    for bits, group in ((1, 1), (2, 1), (1, 8)):
        x = torch.zeros(4, 40)
        x[0], x[1, ::3], x[2, 1::2] = LARGEST, -LARGEST, 2.0**64
        x[3] = torch.linspace(-3.4e38, 3.4e38, 40)
        done = check(filled(x, bits, group), device, divisor=1)
        assert done["residual"].isfinite().all()
        check(filled(x, bits, group, residual=torch.zeros(4, 40, dtype=BF16)), device)


@case("a quotient that overflows is the largest of its group")
def _(device):
    x = torch.full((3, 16), 2.0**64)
    x[:, 4] *= 0.25
    x[0, 0], x[0, 4] = LARGEST, 2.0**127
    done = check(filled(x, group=8), device, divisor=1)
    assert done["out"].view(3, 16)[0].nonzero()[0] == 4


@case("of equals the first, with its sign")
def _(device):
    x = torch.ones(4, 40)
    x[0, ::3], x[1] = -1.0, -1.0
    x[2, 8:16], x[3, 32:] = -0.0, 0.0
    for p in (filled(x, group=GROUP), filled(x, group=GROUP, residual=-0.0 * x)):
        p.average = 0.25
        check(p, device)
        p.residual = None
        message = check(p, device)["message"][0]
        # The third row's second has nothing but minus zeros.
        assert message[sum(p.layout.head) + 2] >> 4 & 15 == 8


@case("additions in the order of the messages, from the first")
def _(device):
    for bits, group, dtype, divisor in ((1, 1, F32, 1), (2, 1, BF16, 3), (1, 8, F32, 7)):
        p = problem(bits, group, 5, 60, residual=None, D=6)
        p.grad *= torch.tensor([1, 3e5, 7e3, 1.7, 50, 2e6])[:, None]
        p.grad[1, 60] = float("inf")
        message = quantized(reference, p, "cpu")["message"]
        assert message is not None
        message = message.contiguous()
        out = check_sum(message[None], p.layout, device, dtype=dtype, divisor=divisor)
        assert out.isnan().sum() == 60
        backwards = check_sum(message[None].flip(1), p.layout, device, dtype=dtype, divisor=divisor)
        assert bits * group > 1 or not torch.equal(out.nan_to_num(), backwards.nan_to_num())


@case("sums beyond the largest number of the output")
def _(device):
    p = filled(torch.full((2, 33), 1e6))
    message = quantized(reference, p, "cpu")["message"]
    assert message is not None
    message = message.contiguous().expand(3, -1)
    assert check_sum(message[None], p.layout, device, dtype=F16, divisor=1).isinf().all()


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, edges=True)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
