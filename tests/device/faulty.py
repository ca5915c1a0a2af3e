"""Kernels with an error that can be switched on, and what they should compute: the watched
interpreter must name the errors.

A case runs on CPU tensors, in whatever stands in for a GPU, and checks what came out.
"""

from __future__ import annotations

from collections.abc import Callable
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
def shift_kernel(x, SEPARATE: tl.constexpr, BLOCK: tl.constexpr):
    """Every program's block to the one before it, or to a place of its own."""
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + (p + 1) * BLOCK + i)
    place = p * BLOCK + i
    if SEPARATE:
        place += (tl.num_programs(0) + 1) * BLOCK
    tl.store(x + place, v)


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


def programs(faulty: bool) -> None:
    """A race between programs."""
    x = numbers(9 * 64)
    want = x[64 : 5 * 64].clone()
    shift_kernel[(4,)](x, SEPARATE=not faulty, BLOCK=64, **OPTIONS)
    same(x[:256] if faulty else x[5 * 64 :], want)


FAULTS: dict[str, Callable[[bool], None]] = {
    "mask": mask, "grid": grid, "barrier": barrier, "programs": programs,
}  # fmt: skip
