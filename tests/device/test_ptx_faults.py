"""The emulator names planted errors, at the kernel's line, and nothing else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

from device.ptx.faults import MisalignedError, OutOfBoundsError, RaceError, UninitializedError
from device.ptx.launch import emulated

if TYPE_CHECKING:
    from triton_kernels.jit import jit, tl
else:
    from tagc.triton_kernels.jit import jit, tl

HERE = r"test_ptx_faults\.py:\d+: "


@jit
def unmasked_kernel(x, out, offset, BLOCK: tl.constexpr):
    """Reads beyond the end."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


@jit
def unordered_kernel(x, out, offset, BLOCK: tl.constexpr):
    """Reads what other threads wrote, without a barrier."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))
    tl.store(out + BLOCK + i, tl.load(out + BLOCK - 1 - i))


@jit
def moving_kernel(x, out, offset, BLOCK: tl.constexpr):
    """Every program's block takes the place of what another program reads."""
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(x + p * BLOCK + i, tl.load(x + (p + 1) * BLOCK + i))


@jit(do_not_specialize=["offset"])
def promising_kernel(x, out, offset, BLOCK: tl.constexpr):
    """Takes an offset for a multiple of 16."""
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + tl.max_contiguous(tl.multiple_of(offset + i, 16), 16)))


@pytest.mark.parametrize(
    ("kernel", "programs", "block", "kind", "message"),
    [
        (
            unmasked_kernel, 2, 512, OutOfBoundsError,
            HERE + r"16 bytes at byte \d+ of tensor 'x', which has 4000",
        ),
        (
            unordered_kernel, 1, 512, RaceError,
            r"ld\.global\S* of tensor 'out' races with st\.global.* without a barrier",
        ),
        (moving_kernel, 4, 64, RaceError, r"tensor 'x' races with .* by another program"),
        (promising_kernel, 1, 512, MisalignedError, HERE + "16 bytes at byte 12 of tensor 'x'"),
    ],
)  # fmt: skip
def test_names_the_error(kernel, programs, block, kind, message):
    x, out = torch.arange(1, 1001, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    with emulated(), pytest.raises(kind, match=message) as found:
        kernel[(programs,)](x, out, 3, BLOCK=block, enable_fp_fusion=False)
    assert type(found.value) is kind


@jit
def total_kernel(x, out, BLOCK: tl.constexpr):
    """Correct: a sum over several warps, which meet in shared memory."""
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


def total() -> None:
    x, out = torch.arange(1024, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    total_kernel[(1,)](x, out, BLOCK=1024, num_warps=4, enable_fp_fusion=False)
    assert out[0] == x.sum(), "wrong result"


def test_finds_nothing_where_nothing_is_wrong():
    with emulated() as launches:
        total()
    assert launches == {"total_kernel": 1}


@pytest.mark.parametrize(
    ("instruction", "kind", "message"),
    [
        (r"bar\.sync", RaceError, r"shared memory races with .* without a barrier"),
        (r"st\.shared", UninitializedError, "nobody wrote"),
        (r"st\.global", AssertionError, "wrong result"),
        # What it should have computed is garbage.
        (r"redux\S*|add\.s32", AssertionError, "wrong result"),
    ],
)
def test_notices_an_instruction_that_the_compiler_dropped(instruction, kind, message):
    def without(ptx: str) -> str:
        pattern = rf"^\t+[^\n]*\b(?:{instruction})[^\n]*;$"
        changed, count = re.subn(pattern, "", ptx, count=1, flags=re.M)
        assert count == 1
        return changed

    with emulated(change=without), pytest.raises(kind, match=message):
        total()
