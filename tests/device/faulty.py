"""Kernels with an error that can be switched on, and what they should compute: the emulator of
docs/testing.md must name the errors.

A case runs on CPU tensors, in whatever stands in for a GPU, and checks what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from triton_kernels.jit import jit, tl
else:
    from tagc.triton_kernels.jit import jit, tl

I32 = torch.int32
_GARBAGE = -77
OPTIONS: Any = {"enable_fp_fusion": False}


@jit
def copy_kernel(x, out, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)
    else:
        tl.store(out + i, tl.load(x + i))


@jit
def reverse_kernel(x, out, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + BLOCK + i, tl.load(out + BLOCK - 1 - i))


@jit
def pack_kernel(x, out, n, LIMITED: tl.constexpr, WORDS: tl.constexpr):
    """Codes of 5 bits, six to a word, eight with padding."""
    lane = tl.arange(0, 8)
    w = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = (lane < 6)[:, None] & (w < n)[None, :]
    code = tl.load(x + lane[:, None] * n + w[None, :], mask=inside, other=0)
    shift = lane * 5
    if LIMITED:
        shift = tl.minimum(shift, 31)
    word = tl.sum((code & 31) << shift[:, None], 0)
    tl.store(out + w, word, mask=w < n)


@jit
def shift_kernel(x, SEPARATE: tl.constexpr, BLOCK: tl.constexpr):
    """Every program's block to the one before it, or to a place of its own."""
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + (p + 1) * BLOCK + i)
    place = p * BLOCK + i
    if SEPARATE:
        place += (tl.num_programs(0) + 1) * BLOCK
    tl.store(x + place, v)


@jit(do_not_specialize=["offset"])
def aligned_kernel(x, out, offset, PROMISED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    j = offset + i
    if PROMISED:
        j = tl.max_contiguous(tl.multiple_of(j, 16), 16)
    tl.store(out + i, tl.load(x + j))


@jit
def total_kernel(x, out, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


def numbers(n: int) -> Tensor:
    """``[n]`` int32."""
    return torch.arange(n, dtype=I32) * 7 + 3


def garbage(n: int) -> Tensor:
    """An output that nobody wrote."""
    return torch.full((n,), _GARBAGE, dtype=I32)


def same(got: Tensor, want: Tensor) -> None:
    """Fail if not equal."""
    assert torch.equal(got, want), f"wrong results: {got.tolist()[:8]}, not {want.tolist()[:8]}"


def mask(faulty: bool) -> None:
    """A missing mask."""
    x, out = numbers(1000), garbage(1000)
    copy_kernel[(2,)](x, out, 1000, MASKED=not faulty, BLOCK=512, **OPTIONS)
    same(out, x)


def grid(faulty: bool) -> None:
    """One program too few."""
    x, out = numbers(1000), garbage(1000)
    copy_kernel[(1 if faulty else 2,)](x, out, 1000, MASKED=True, BLOCK=512, **OPTIONS)
    same(out, x)


def barrier(faulty: bool) -> None:
    """A dropped barrier."""
    x, out = numbers(512), garbage(1024)
    reverse_kernel[(1,)](x, out, BARRIER=not faulty, BLOCK=512, **OPTIONS)
    same(out, torch.cat([x, x.flip(0)]))


def shift(faulty: bool) -> None:
    """A shift by 32 and more, of what is zero."""
    x, out = numbers(6 * 100), garbage(100)
    pack_kernel[(1,)](x, out, 100, LIMITED=not faulty, WORDS=128, **OPTIONS)
    places = 5 * torch.arange(6, dtype=I32)
    same(out, ((x.view(6, 100) & 31) << places[:, None]).sum(0, dtype=I32))


def programs(faulty: bool) -> None:
    """A race between programs."""
    x = numbers(9 * 64)
    want = x[64 : 5 * 64].clone()
    shift_kernel[(4,)](x, SEPARATE=not faulty, BLOCK=64, **OPTIONS)
    same(x[:256] if faulty else x[5 * 64 :], want)


def alignment(faulty: bool) -> None:
    """A promise that an offset is a multiple of 16, which it is not."""
    x, out = numbers(1024), garbage(512)
    aligned_kernel[(1,)](x, out, 3, PROMISED=faulty, BLOCK=512, **OPTIONS)
    same(out, x[3:515])


def total() -> None:
    """No error: a sum over several warps, which meet in shared memory."""
    x, out = numbers(1024), garbage(1)
    total_kernel[(1,)](x, out, BLOCK=1024, num_warps=4, **OPTIONS)
    same(out, x.sum(0, dtype=I32)[None])


FAULTS: dict[str, Callable[[bool], None]] = {
    "mask": mask, "grid": grid, "barrier": barrier, "shift": shift, "programs": programs,
    "alignment": alignment,
}  # fmt: skip
CORRECT = {name: partial(fault, False) for name, fault in FAULTS.items()} | {"total": total}
