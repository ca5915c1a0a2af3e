"""The Triton operators of block quantization against the reference, to the bit.

Every case runs interpreted on the CPU and, where there is a GPU, natively (``-m gpu``).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from support.kernel_cases import Cases, canonical, check_margins, kernels, placed, same
from support.sync import synchronizing_raises
from tagc.ops import reference
from tagc.ops.blocks import BITS, BlockLayout

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
F32, BF16, F16, I32 = torch.float32, torch.bfloat16, torch.float16, torch.int32
LARGEST = torch.finfo(F32).max


@dataclass
class Problem:
    """Arguments of quantize, on the CPU."""

    grad: Tensor
    residual: Tensor | None
    layout: BlockLayout
    average: float = 0.0
    dither: Tensor | None = None


def problem(
    bits: int,
    block: int,
    numel: int,
    grad: torch.dtype = F32,
    residual: torch.dtype | None = F32,
    average: float = 0.0,
    *,
    R: int = 2,
    seed: int = 0,
) -> Problem:
    rng = np.random.default_rng([numel, bits, seed])
    return Problem(
        oracle.values((R, numel), rng).to(grad),
        None if residual is None else oracle.values((R, numel), rng).to(residual),
        BlockLayout(numel=numel, bits=bits, block=block), average,
    )  # fmt: skip


def filled(x: Tensor, bits: int, block: int = 32, residual: Tensor | None = None) -> Problem:
    """Given rows; no residual means zeros."""
    residual = torch.zeros_like(x) if residual is None else residual
    return Problem(x, residual, BlockLayout(numel=x.shape[1], bits=bits, block=block))


def quantized(ops, p: Problem, device: str, aligned: bool = False) -> dict[str, Tensor | None]:
    out = {
        "message": oracle.poisoned(p.grad.shape[0], p.layout.words, dtype=I32),
        "residual": p.residual,
    }
    out = {k: placed(v, device, aligned) for k, v in out.items()}
    grad = placed(p.grad, device, aligned)
    ops.quantize(
        grad, out["residual"], out["message"],
        layout=p.layout, average=p.average, dither=placed(p.dither, device, True),
    )  # fmt: skip
    same("gradient", grad, p.grad)
    for tensor in out.values():
        check_margins(tensor)
    return out


def check_sum(
    message: Tensor, layout: BlockLayout, device: str, *, dtype=F32, divisor=3, aligned=False
) -> Tensor:
    """dequantize ``[K, R, words]`` against the reference."""
    out = []
    for ops, where in ((reference, "cpu"), (kernels("ops"), device)):
        result = placed(
            oracle.poisoned(message.shape[0], layout.numel, dtype=dtype), where, aligned
        )
        sent = placed(message, where, aligned)
        ops.dequantize(sent, result, layout=layout, divisor=divisor)
        same("message", sent, message)
        check_margins(result)
        out.append(result)
    same("out", canonical(out[1]), canonical(out[0]))
    return out[0]


def check(p: Problem, device: str, *, dtype=F32, divisor=3, aligned=False) -> dict[str, Tensor]:
    """Quantize, then add up all rows, against the reference; what that gives."""
    want = quantized(reference, p, "cpu", aligned)
    got = quantized(kernels("ops"), p, device, aligned)
    for name, tensor in want.items():
        same(name, got[name], tensor)
    message = want["message"]
    assert message is not None
    out = check_sum(message[None], p.layout, device, dtype=dtype, divisor=divisor, aligned=aligned)
    results = {**want, "out": out[0]}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


CASES = case = Cases()


@case("a sum that overflows is not finite")
def _(device):
    p = problem(8, 32, 64, R=1)
    assert p.residual is not None
    p.grad[0, 7] = p.residual[0, 7] = 3e38
    assert check(p, device)["out"].isnan().sum() == 32


@case("the largest numbers")
def _(device):
    for bits in BITS:
        x = torch.zeros(4, 64)
        x[0], x[1, ::3], x[2, 1::2] = LARGEST, -LARGEST, 3.39e38
        x[3] = torch.linspace(-3.4e38, 3.4e38, 64)
        done = check(filled(x, bits), device, divisor=1)
        assert done["residual"].isfinite().all()
        check(filled(x, bits, residual=torch.zeros(4, 64, dtype=BF16)), device)


@case("numbers next to zero")
def _(device):
    # Scales around MIN_SCALE, with residuals and sums that are subnormal.
    for bits in BITS:
        levels = (1 << (bits - 1)) - 1
        scale = torch.tensor([0.25, 0.99, 0.998, 0.9985, 0.999, 1, 1.002, 1.0, 3]) * 2.0**-126
        x = (torch.linspace(-1, 1, 32) * levels)[None] * scale[:, None]
        x[7] = 0.0
        x[7, 5] = -0.0
        done = check(filled(x.reshape(1, -1), bits), device, divisor=3)
        halves = done["message"].contiguous().view(torch.int16)[0, :9]
        assert halves[0] == 0
        assert halves[5] == 0x80
        assert halves[7] == 0
        check(filled(x.reshape(1, -1), bits, residual=torch.zeros(1, 288, dtype=BF16)), device)


@case("halves round to even")
def _(device):
    x = torch.arange(64.0)[None] - 31.5
    x[0, 31], x[0, 63] = 127.0, -127.0
    done = check(filled(x, 8), device, divisor=1)
    assert done["out"][:4].tolist() == [-32, -30, -30, -28]


@case("codes are clipped")
def _(device):
    # Scales that rounded down, so that the largest elements are beyond the largest code.
    x = torch.full((1, 128), 3.0)
    x[0] *= torch.linspace(1.0, 1.01, 128)
    for bits in BITS:
        done = check(filled(x, bits), device)
        assert done["residual"].abs().max() > 0


@case("zeros of both signs")
def _(device):
    for residual in (F32, BF16):
        for average in (0.0, 0.5):
            x = torch.zeros(1, 96)
            x[0, ::2] = -0.0
            x[0, 40], x[0, 90] = 1.0, -2.0
            p = filled(x, 4, residual=x.to(residual))
            p.average = average
            check(p, device)


@case("additions in the order of the messages, from the first")
def _(device):
    rng = np.random.default_rng(0)
    for bits, dtype, divisor in ((8, F32, 1), (8, BF16, 3), (4, F16, 4), (4, F32, 7)):
        layout = BlockLayout(numel=150, bits=bits, block=32)
        x = oracle.values((12, 150), rng) * torch.from_numpy(rng.choice([1, 1e3, 1e-3], (12, 1)))
        message = torch.empty(12, layout.words, dtype=I32)
        reference.quantize(x.float(), None, message, layout=layout, average=0.0)
        check_sum(message.view(2, 6, -1), layout, device, dtype=dtype, divisor=divisor)
        check_sum(message.view(12, 1, -1), layout, device, dtype=dtype, divisor=divisor)
        backwards = message.view(2, 6, -1).flip(1).contiguous()
        assert dtype != F32 or not torch.equal(
            check_sum(backwards, layout, device, divisor=divisor),
            check_sum(message.view(2, 6, -1), layout, device, divisor=divisor),
        )


@case("any message has a sum")
def _(device):
    rng = np.random.default_rng(1)
    for bits in BITS:
        layout = BlockLayout(numel=99, bits=bits, block=32)
        words = rng.integers(-(2**31), 2**31, (2, 3, layout.words), dtype=np.int32)
        words[0, :, : layout.scale_words] = 0x41203C9A  # of all codes, also -levels - 1
        words[1, :, 0] = np.int32(-0x80000000 + 0x8000)  # minus zeros do not become zeros
        check_sum(torch.from_numpy(words), layout, device)


@case("sums beyond the largest number of the output")
def _(device):
    x = torch.full((4, 64), 3e38)
    layout = BlockLayout(numel=64, bits=8, block=32)
    message = torch.empty(4, layout.words, dtype=I32)
    reference.quantize(x, None, message, layout=layout, average=0.0)
    for dtype, divisor in ((F32, 1), (F16, 4), (BF16, 1)):
        assert check_sum(message[None], layout, device, dtype=dtype, divisor=divisor).isinf().all()
        check_sum(message[:, None], layout, device, dtype=dtype, divisor=divisor)


# --- interpreted in a process of its own, compiled and emulated, natively ----------------------

outcome, test_interpreted, test_compiled, test_on_a_gpu = CASES.tests(__file__, edges=True)

gpu = pytest.mark.gpu


def gpu_step(p: Problem):
    """Device arguments of a quantize and a dequantize, and a function that runs both."""
    ops, layout = kernels("ops"), p.layout
    assert p.residual is not None
    t = {
        "grad": p.grad.cuda(), "residual": p.residual.cuda(),
        "message": oracle.poisoned(p.grad.shape[0], layout.words, dtype=I32).cuda(),
        "out": oracle.poisoned(1, layout.numel, dtype=F32).cuda(),
    }  # fmt: skip

    def run() -> None:
        ops.quantize(t["grad"], t["residual"], t["message"], layout=layout, average=p.average)
        ops.dequantize(t["message"][None], t["out"], layout=layout, divisor=3)

    return t, run


@gpu
def test_nothing_waits_for_the_device():
    _, run = gpu_step(problem(8, 256, 5003))
    run()
    with synchronizing_raises():
        run()


@gpu
@pytest.mark.parametrize(("bits", "average"), [(8, 0.0), (4, 0.9)])
def test_a_cuda_graph_holds_a_step(bits, average):
    t, run = gpu_step(problem(bits, 256, 5003, BF16, BF16, average))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    kernels("ops").release()
    for seed in (5, 6):
        other = problem(bits, 256, 5003, BF16, BF16, average, seed=seed)
        assert other.residual is not None
        t["grad"].copy_(other.grad)
        t["residual"].copy_(other.residual)
        graph.replay()
        want = check(other, "cuda")
        for name in ("message", "residual"):
            same(name, t[name], want[name])
        same("out", t["out"][0], want["out"])


@gpu
def test_more_than_two_to_the_31_elements():
    n = (1 << 31) + 1040
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free device memory")
    ops, layout = kernels("ops"), BlockLayout(numel=n, bits=4, block=256)
    where = torch.tensor([0, 5, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, n - 1], device="cuda")
    grad = torch.zeros(1, n, dtype=BF16, device="cuda")
    grad[:, where] = torch.tensor([7.0, 7, 14, 21, 28, 35], device="cuda").to(BF16)
    residual = torch.zeros_like(grad)
    message = torch.empty(1, layout.words, dtype=I32, device="cuda")
    ops.quantize(grad, residual, message, layout=layout, average=0.0)
    assert not residual[:, where].any()
    out = torch.full((1, n), float("nan"), dtype=BF16, device="cuda")
    ops.dequantize(message[None], out, layout=layout, divisor=1)
    assert torch.equal(out, grad)


if __name__ == "__main__":
    CASES.main(Path(sys.argv[1]))
