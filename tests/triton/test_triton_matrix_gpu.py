"""The Triton operators of quantized matrices on a GPU: launches, graphs, sizes."""

from __future__ import annotations

import pytest
import torch

from support import oracle
from support.kernel_cases import kernels, same
from support.matrix_kernels import BF16, F32, I32, Problem, check, problem
from support.sync import synchronizing_raises
from tagc.ops.matrix import MatrixLayout

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")

pytestmark = pytest.mark.gpu


def gpu_step(p: Problem):
    """Device arguments of quantize_matrix and dequantize_matrix, and a function that runs both."""
    ops, layout = kernels("ops"), p.layout
    assert p.residual is not None
    t = {
        "grad": p.grad.cuda(), "residual": p.residual.cuda(),
        "message": oracle.poisoned(p.grad.shape[0], layout.words, dtype=I32).cuda(),
        "out": oracle.poisoned(1, layout.numel, dtype=F32).cuda(),
    }  # fmt: skip

    def run() -> None:
        ops.quantize_matrix(
            t["grad"], t["residual"], t["message"], layout=layout, average=p.average
        )
        ops.dequantize_matrix(t["message"][None], t["out"], layout=layout, divisor=3)

    return t, run


@pytest.mark.parametrize(("bits", "group"), [(1, 1), (1, 8)])
def test_nothing_waits_for_the_device(bits, group):
    _, run = gpu_step(problem(bits, group, 100, 301))
    run()
    with synchronizing_raises():
        run()


@pytest.mark.parametrize(("bits", "group", "average"), [(2, 1, 0.0), (1, 8, 0.9)])
def test_a_cuda_graph_holds_a_step(bits, group, average):
    t, run = gpu_step(problem(bits, group, 100, 301, BF16, BF16, average))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    kernels("ops").release()
    for seed in (5, 6):
        other = problem(bits, group, 100, 301, BF16, BF16, average, seed=seed)
        assert other.residual is not None
        t["grad"].copy_(other.grad)
        t["residual"].copy_(other.residual)
        graph.replay()
        want = check(other, "cuda")
        for name in ("message", "residual", "out"):
            same(name, t[name].view_as(want[name]), want[name])


@pytest.mark.parametrize(("rows", "columns"), [(512, 4096), (3, 16384), (2048, 1500)])
@pytest.mark.parametrize(("bits", "group"), [(1, 1), (2, 1), (1, 8)])
def test_large_matrices(bits, group, rows, columns):
    """Sizes of a model's layers: many programs, long lanes."""
    check(problem(bits, group, rows, columns, BF16, BF16), "cuda", aligned=True)


def test_more_than_two_to_the_31_elements():
    rows, columns = (1 << 17) + 1, 1 << 14
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free device memory")
    ops, layout = kernels("ops"), MatrixLayout(rows=rows, columns=columns)
    # The columns' sums are about 2**17, so all scales are exact and nothing is left.
    where = torch.tensor([0, 5, (1 << 16) + 1, rows - 1], device="cuda")
    grad = torch.ones(1, rows * columns, dtype=BF16, device="cuda")
    values = torch.tensor([1.25, 2, 1.5, -3], dtype=BF16, device="cuda")
    grad.view(rows, columns)[where] = values[:, None]
    residual = torch.zeros_like(grad)
    message = torch.empty(1, layout.words, dtype=I32, device="cuda")
    ops.quantize_matrix(grad, residual, message, layout=layout, average=0.0)
    assert not residual.any()
    out = torch.full((1, rows * columns), float("nan"), dtype=BF16, device="cuda")
    ops.dequantize_matrix(message[None], out, layout=layout, divisor=1)
    assert torch.equal(out, grad)
