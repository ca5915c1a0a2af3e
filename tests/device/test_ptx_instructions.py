"""Single instructions, emulated: what the PTX ISA says of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from device.ptx import control
from device.ptx.faults import DivergenceError, NotEmulatedError, RaceError
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


def launch(
    body: str, out: Tensor, *, threads: int = 32, shared: int = 0, programs: int = 1
) -> None:
    """Run lines of PTX; %rd1 is the address of ``out``, %rd3 that of the thread's element, %r90 the
    thread."""
    lines = "".join(f"\t{line.strip()}\n" for line in body.strip().splitlines())
    kernel = parse(HEAD + lines + "\tret;\n}\n")
    execute(
        kernel, control.compiled(kernel), [("out", "*i32", out)], (programs, 1, 1), threads, shared,
        np.random.default_rng(0),
    )  # fmt: skip


def ran(body: str, **options: int) -> list[int]:
    """What each thread has in %r1, as unsigned."""
    out = torch.zeros(options.get("threads", 32), dtype=torch.int32)
    launch(body + "\nst.global.b32 [ %rd3 + 0 ], { %r1 };", out, **options)
    return [x & 0xFFFFFFFF for x in out.tolist()]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("shl.b32 %r1, 1, 32;", 0),  # defined in PTX; not so in LLVM
        ("shr.s32 %r1, -8, 40;", 0xFFFFFFFF),
        ("shr.u32 %r1, -8, 32;", 0),
        ("shf.l.wrap.b32 %r1, 0x80000001, 0x0000000F, 4;", 0xF8),
        ("shf.r.wrap.b32 %r1, 0x80000001, 0x0000000F, 4;", 0xF8000000),
        ("bfe.u32 %r1, 0xABCD1234, 8, 8;", 0x12),
        ("bfe.s32 %r1, 0x0000F000, 12, 4;", 0xFFFFFFFF),
        ("bfe.s32 %r1, 0x80000000, 28, 16;", 0xFFFFFFF8),
        ("max.s32 %r1, -8, -9;", 0xFFFFFFF8),
        ("popc.b32 %r1, 0xF000000F;", 8),
        ("prmt.b32 %r1, 0x33221100, 0x77665544, 0x5410;", 0x55441100),
        ("prmt.b32 %r1, 0x00000080, 0, 0x0008;", 0x808080FF),
        ("mul.hi.u32 %r1, -1, -1;", 0xFFFFFFFE),
        ("mul.hi.s32 %r1, -1, 2;", 0xFFFFFFFF),
        ("mul.hi.u64 %rd4, -1, -3;\ncvt.u32.u64 %r1, %rd4;", 0xFFFFFFFC),
        ("div.s32 %r1, -7, 2;", 0xFFFFFFFD),
        ("rem.s32 %r1, -7, 2;", 0xFFFFFFFF),
        ("min.f32 %r1, 0f80000000, 0f00000000;", 0x80000000),
        ("max.f32 %r1, 0f7FC00000, 0f3F800000;", 0x3F800000),
        ("add.rn.f32 %r1, 0f7F800000, 0fFF800000;", 0x7FFFFFFF),
        ("mul.rn.f32 %r1, 0f00800000, 0f3F000000;", 0x00400000),  # subnormals are not flushed
        # (1 + 2**-23)**2 - (1 + 2**-22) is 2**-46; next to a half, only one rounding is right.
        ("fma.rn.f32 %r1, 0f3F800001, 0f3F800001, 0fBF800002;", 0x28800000),
        ("fma.rn.f32 %r1, 0f3F7FFFFE, 0f33800001, 0f3F800001;", 0x3F800001),
        ("fma.rn.f32 %r1, 0f3F800001, 0f33800001, 0f3F800000;", 0x3F800001),
        ("fma.rn.f32 %r1, 0f2E800000, 0f2E800000, 0f3F800001;", 0x3F800001),
        ("fma.rn.f32 %r1, 0f7F7FFFFF, 0f40000000, 0fFF7FFFFF;", 0x7F7FFFFF),
        ("cvt.rzi.s32.f32 %r1, 0fC0300000;", 0xFFFFFFFE),
        ("cvt.rzi.s32.f32 %r1, 0f7FC00000;", 0),
        ("cvt.rzi.s32.f32 %r1, 0f7F000000;", 0x7FFFFFFF),
        ("cvt.rn.f32.s32 %r1, 16777217;", 0x4B800000),
        ("cvt.rn.f16x2.f32 %r1, 0f3F800000, 0f477FF000;", 0x3C007C00),  # the lower overflows
        ("cvt.rn.bf16x2.f32 %r1, 0f3F808000, 0f3F818000;", 0x3F803F82),  # both are ties
        ("cvt.rn.bf16x2.f32 %r1, 0f7F7FFFFF, 0fFFC00001;", 0x7F807FFF),  # infinite, NaN
    ],
)
def test_one_number(line, want):
    assert ran(line) == [want] * 32


def test_atomic_additions_flush_subnormal_floats():
    tiny = torch.tensor([1.0, 2.0**-127])
    launch("red.global.gpu.relaxed.add.f32 [ %rd1 + 4 ], 0f00000001;", tiny)
    assert tiny.tolist() == [1.0, 0.0]


def test_a_volatile_read_may_meet_an_atomic_update():
    out = torch.zeros(1, dtype=torch.int32)
    body = "{} %r1, [ %rd1 + 0 ];\nred.global.gpu.relaxed.add.u32 [ %rd1 + 0 ], 1;"
    launch(body.format("ld.volatile.global.b32"), out, programs=3)
    assert out[0] == 96
    with pytest.raises(RaceError, match=r"by another program|without a barrier"):
        launch(body.format("ld.global.b32"), out, programs=3)


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
