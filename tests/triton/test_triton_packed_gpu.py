"""The Triton operators of sparse packing on a GPU: launches, graphs, sizes."""

from __future__ import annotations

import pytest
import torch

from support import oracle
from support.kernel_cases import kernels, same
from support.packed_kernels import (
    BF16,
    F32,
    I32,
    Problem,
    check,
    check_select,
    problem,
)
from support.sync import synchronizing_raises
from tagc.ops.packed import KEPT_GROUPS, plan_packed

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


gpu = pytest.mark.gpu


def gpu_step(p: Problem):
    """Device arguments of a pack and an unpack, and a function that runs both."""
    ops, layout = kernels("ops"), p.layout
    assert p.residual is not None
    R = p.grad.shape[0]
    t = {
        "grad": p.grad.cuda(), "residual": p.residual.cuda(), "threshold": p.threshold.cuda(),
        "message": oracle.poisoned(R, layout.words, dtype=I32).cuda(),
        "counts": oracle.poisoned(R, 4, dtype=I32).cuda(),
        "marks": oracle.poisoned(R, layout.bitmap_words, dtype=I32).cuda(),
        "marks counts": oracle.poisoned(R, 4, dtype=I32).cuda(),
        "index": oracle.poisoned(R, layout.index_words, dtype=I32).cuda(),
        "out": oracle.poisoned(layout.numel, dtype=F32).cuda(),
    }  # fmt: skip

    def run() -> None:
        ops.select(t["grad"], t["threshold"], t["marks"], t["marks counts"], layout=layout)
        ops.write_index(t["marks"], t["index"], layout=layout)
        ops.read_index(t["index"], t["marks"], layout=layout)
        ops.pack(
            t["grad"], t["residual"], t["threshold"], t["message"], t["counts"],
            layout=layout,
        )  # fmt: skip
        ops.unpack(t["message"], t["out"], layout=layout, divisor=3)

    return t, run


@gpu
@pytest.mark.parametrize("low", [0, 2])
def test_nothing_waits_for_the_device(low):
    _, run = gpu_step(problem(5003, "overflow", group=4, low=low))
    run()
    with synchronizing_raises():
        run()


@gpu
@pytest.mark.parametrize("low", [0, 2])
def test_a_cuda_graph_holds_a_step(low):
    shape = {"group": 4, "low": low, "grad": BF16, "residual": BF16}
    t, run = gpu_step(problem(5003, "overflow", **shape))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    kernels("ops").release()
    for seed in (5, 6):
        other = problem(5003, "overflow", seed=seed, **shape)
        for name in ("grad", "residual", "threshold"):
            t[name].copy_(getattr(other, name))
        graph.replay()
        want = check(other, "cuda")
        for name in ("message", "counts", "residual", "out"):
            same(name, t[name], want[name])
        bitmap = check_select(other.grad, other.threshold, other.layout, "cuda")
        same("marks", t["marks"], bitmap)


@gpu
def test_more_than_two_to_the_31_elements():
    n = (1 << 31) + 1040
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free device memory")
    ops, layout = kernels("ops"), plan_packed(n, capacity=6 * 1024, group=2, bits=4)
    where = torch.tensor([0, 5, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, n - 1], device="cuda")
    grad = torch.zeros(1, n, dtype=BF16, device="cuda")
    grad[:, where] = 7.0
    residual = torch.zeros_like(grad)
    message = torch.empty(1, layout.words, dtype=I32, device="cuda")
    counts = torch.empty(1, 4, dtype=I32, device="cuda")
    one = torch.ones(1, device="cuda")
    ops.pack(grad, residual, one, message, counts, layout=layout)
    assert counts.tolist() == [[6, 6, 6, 0]]
    assert message[0, KEPT_GROUPS] == 6
    assert not residual.any()
    out = torch.full((n,), float("nan"), dtype=BF16, device="cuda")
    ops.unpack(message, out, layout=layout, divisor=1)
    assert torch.equal(out, grad[0])
    kernels("scratch").release()
