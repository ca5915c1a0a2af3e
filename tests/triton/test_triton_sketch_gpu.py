"""The Triton operators of sketches on a GPU: launches, graphs, sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support import oracle
from support.kernel_cases import kernels, same
from support.sketch_kernels import (
    BF16,
    F32,
    I32,
    Problem,
    check_codec,
    problem,
    run_decode,
    run_encode,
)
from support.sync import synchronizing_raises
from tagc.ops import reference
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")


gpu = pytest.mark.gpu


@gpu
def test_peeling_is_over_before_the_last_launch():
    table = kernels("table")
    rng = np.random.default_rng(0)
    for symbol, keys in (("int8x4", 200), ("int8x4", 5000), ("int8x4", 300_000), ("int32x1", 5000)):
        layout = plan_layout(4 * keys * SYMBOLS[symbol].lanes * 4, SYMBOLS[symbol], keys)
        assert not layout.direct
        present = torch.zeros(layout.groups, dtype=torch.bool)
        present[rng.choice(layout.groups, keys, replace=False)] = True
        symbols = torch.from_numpy(rng.integers(-1000, 1000, layout.groups)).to(I32)
        assert not check_codec(layout, present, symbols, "cuda").any()
        device = torch.device("cuda", torch.cuda.current_device())
        pending = table.table_of(layout, device).pending
        last = kernels("peel").launches(layout)
        assert pending[last] == 0, f"{keys} keys of {symbol} needed the last program"


def gpu_step(p: Problem):
    """Device arguments of one encode and one decode of row 0, and a function that runs both."""
    ops, layout = kernels("ops"), p.layout
    W = p.grad.shape[0]
    t = {
        "grad": p.grad.cuda(),
        "residual": None if p.residual is None else p.residual.cuda(),
        "threshold": p.threshold.cuda(), "step": p.step.cuda(), "seed": p.seed.cuda(),
        "index": oracle.poisoned(W, layout.index_words, dtype=I32).cuda(),
        "cells": oracle.poisoned(W, layout.cells, dtype=I32).cuda(),
        "counts": oracle.poisoned(W, 4, dtype=I32).cuda(),
        "total": oracle.poisoned(layout.cells, dtype=I32).cuda(),
        "out": oracle.poisoned(layout.numel, dtype=F32).cuda(),
        "stats": oracle.poisoned(2, dtype=I32).cuda(),
    }  # fmt: skip

    def run() -> None:
        ops.encode(
            t["grad"], t["residual"], t["threshold"], t["step"], t["seed"], t["index"],
            t["cells"], t["counts"], layout=layout, levels=p.levels, capacity=p.capacity,
        )  # fmt: skip
        torch.sum(t["cells"], 0, dtype=I32, out=t["total"])
        ops.decode(
            t["index"], t["total"], t["step"][:1], t["seed"], t["out"],
            None if t["residual"] is None else t["residual"][0], t["stats"],
            layout=layout, divisor=3,
        )  # fmt: skip

    return t, run


@gpu
def test_nothing_waits_for_the_device():
    _, run = gpu_step(problem("int8x4", F32, F32, 5000, "overflow", hashes=4))
    run()
    with synchronizing_raises():
        run()


@gpu
@pytest.mark.parametrize("symbol", ["int8x4", "int16x2"])
def test_a_cuda_graph_holds_a_step(symbol):
    p = problem(symbol, F32, BF16, 5003, "overflow", hashes=4)
    t, run = gpu_step(p)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    kernels("ops").release()
    for seed in (5, 6):
        other = problem(symbol, F32, BF16, 5003, "overflow", hashes=4, seed=seed)
        for name in ("grad", "residual", "threshold", "step", "seed"):
            t[name].copy_(getattr(other, name))
        graph.replay()
        other.layout = p.layout
        want = run_encode(reference, other, "cpu", True)
        assert want["index"] is not None
        assert want["cells"] is not None
        assert want["residual"] is not None
        total = want["cells"].sum(0, dtype=I32)
        other.residual = want["residual"]
        decoded = run_decode(reference, want["index"], total, other, F32, 3, "cpu", True)
        for name in ("index", "cells", "counts"):
            same(name, t[name], want[name])
        for name in ("out", "stats"):
            same(name, t[name], decoded[name])
        same("residual", t["residual"][0], decoded["residual"])
        same("residual of others", t["residual"][1:], want["residual"][1:])


@gpu
def test_more_than_two_to_the_31_elements():
    n, W = (1 << 31) + 1040, 2
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free device memory")
    ops, symbol = kernels("ops"), SYMBOLS["int8x4"]
    layout = plan_layout(n, symbol, 1000)
    where = torch.tensor([0, 5, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, n - 1], device="cuda")
    grad = torch.zeros(W, n, dtype=BF16, device="cuda")
    grad[:, where] = torch.arange(1, 7, dtype=BF16, device="cuda")
    residual = torch.zeros(W, n, dtype=BF16, device="cuda")
    one, seed = torch.ones(W, device="cuda"), torch.tensor([3], dtype=I32, device="cuda")
    index = torch.empty(W, layout.index_words, dtype=I32, device="cuda")
    cells = torch.empty(W, layout.cells, dtype=I32, device="cuda")
    counts = torch.empty(W, 4, dtype=I32, device="cuda")
    ops.encode(
        grad, residual, one, one, seed, index, cells, counts,
        layout=layout, levels=63, capacity=500,
    )  # fmt: skip
    groups = int((where // 4).unique().numel())
    assert counts.tolist() == [[groups, groups, groups, 0]] * W
    out, stats = torch.full((n,), float("nan"), dtype=BF16, device="cuda"), torch.empty_like(seed)
    stats = torch.empty(2, dtype=I32, device="cuda")
    ops.decode(
        index, cells.sum(0, dtype=I32), one[:1], seed, out, residual[0], stats,
        layout=layout, divisor=W,
    )  # fmt: skip
    assert stats.tolist() == [groups, 0]
    assert out[where].tolist() == [1, 2, 3, 4, 5, 6]
    out[where] = 0
    assert not out.any()
    assert not residual.any()
    kernels("scratch").release()
