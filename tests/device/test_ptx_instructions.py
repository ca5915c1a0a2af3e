"""What the emulator refuses of lines of PTX. What instructions compute is compared with the
reference, in `tests/triton`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from device.ptx import control
from device.ptx.faults import DivergenceError, NotEmulatedError
from device.ptx.launch import execute
from device.ptx.parse import parse

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
HEAD = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0
)
{
	.reg .pred %p<9>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<99>;
	.reg .b64 %rd<9>;
	ld.param.b64 %rd1, [k_param_0];
	mov.u32 %r90, %tid.x;
	mul.wide.u32 %rd2, %r90, 4;
	add.s64 %rd3, %rd1, %rd2;
"""


def launch(body: str, out: Tensor, *, threads: int = 32) -> None:
    """Run lines of PTX; %rd1 is the address of ``out``, %rd3 that of the thread's element, %r90 the
    thread."""
    lines = "".join(f"\t{line.strip()}\n" for line in body.strip().splitlines())
    kernel = parse(HEAD + lines + "\tret;\n}\n")
    execute(
        kernel, control.compiled(kernel), [("out", "*i32", out)], (1, 1, 1), threads, 0,
        np.random.default_rng(0),
    )  # fmt: skip


def test_not_all_threads_reach_a_barrier():
    body = "setp.lt.u32 %p1, %r90, 40;\n@%p1 bra $end;\nbar.sync 0;\n$end:"
    with pytest.raises(DivergenceError, match="24 of 64 threads of program 0"):
        launch(body, torch.zeros(64, dtype=torch.int32), threads=64)


def test_not_all_lanes_take_part():
    body = "setp.lt.u32 %p1, %r90, 4;\n@%p1 shfl.sync.bfly.b32 %r1, %r90, 1, 31, -1;"
    with pytest.raises(DivergenceError, match="without all lanes"):
        launch(body, torch.zeros(32, dtype=torch.int32))


@pytest.mark.parametrize("line", ["ex2.approx.f32 %r1, %r2;", "add.rn.ftz.f32 %r1, %r2, %r2;",
                                  "div.full.f32 %r1, %r2, %r2;"])  # fmt: skip
def test_what_is_not_emulated_is_refused(line):
    with pytest.raises(NotEmulatedError):
        launch(line, torch.zeros(1, dtype=torch.int32))
