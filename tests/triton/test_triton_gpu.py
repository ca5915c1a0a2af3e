"""The Triton operators on a GPU: in graphs, and in large sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.edges import BF16, I32
from support.exact import equal
from support.launches import kernels
from support.trials import Case, one_of_each
from tagc.ops import get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
pytestmark = pytest.mark.gpu
REFERENCE = get_ops("cpu", "reference")


@pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.call.operator)
def test_a_cuda_graph_holds_a_call(case: Case):
    """So nothing in it waits for the device: a capture would fail."""
    if case.call.operator == "peel":
        pytest.skip("its results are new tensors")
    graph, operator = torch.cuda.CUDAGraph(), getattr(kernels("ops"), case.call.operator)
    tensors: Any = {n: None if x is None else x.cuda() for n, x in case.tensors.items()}
    call = partial(operator, **tensors, **dict(case.call.options))
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    kernels("ops").release()
    want = case.run(REFERENCE, Tensor.clone)
    for _ in range(2):
        for name, x in case.tensors.items():
            if x is not None:
                tensors[name].copy_(x)
        graph.replay()
        equal({name: tensors[name].cpu() for name in want}, want)


def test_peeling_is_over_before_the_last_launch():
    table = kernels("table")
    rng = np.random.default_rng(0)
    for symbol, keys in (("int8x4", 200), ("int8x4", 5000), ("int8x4", 300_000), ("int32x1", 5000)):
        layout = plan_layout(4 * keys * SYMBOLS[symbol].lanes * 4, SYMBOLS[symbol], keys)
        assert not layout.direct
        present = torch.zeros(layout.groups, dtype=torch.bool)
        present[rng.choice(layout.groups, keys, replace=False)] = True
        symbols = torch.from_numpy(rng.integers(-1000, 1000, layout.groups)).to(I32).cuda()
        index, seed = to_bitmap(present).cuda(), torch.tensor([-7], dtype=I32).cuda()
        cells = torch.empty(layout.cells, dtype=I32).cuda()
        kernels("ops").insert(symbols, index, seed, cells, layout=layout)
        got, stuck = kernels("ops").peel(cells, index, seed, layout=layout)
        assert not stuck.any()
        assert torch.equal(got, symbols * present.cuda())
        device = torch.device("cuda", torch.cuda.current_device())
        last = kernels("peel").launches(layout)
        assert table.table_of(layout, device).pending[last] == 0, f"{keys} keys of {symbol}"


def needs(gigabytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of free device memory")


@pytest.mark.parametrize(
    ("operator", "layout", "where", "values"),
    [
        (
            "quantize", BlockLayout(numel=(1 << 31) + 1040, bits=4, block=256),
            [0, 5, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, -1], [7, 7, 14, 21, 28, 35],
        ),
        # Rows among ones. The columns' sums are about 2**17, so all scales are exact.
        (
            "quantize_matrix", MatrixLayout(rows=(1 << 17) + 1, columns=1 << 14),
            [0, 5, (1 << 16) + 1, -1], [1.25, 2, 1.5, -3],
        ),
    ],
)  # fmt: skip
def test_rows_of_more_than_two_to_the_31_elements(operator, layout, where, values):
    needs(24)
    columns = getattr(layout, "columns", 1)
    grad = torch.full((1, layout.numel), float(columns > 1), dtype=BF16, device="cuda")
    grad.view(-1, columns)[where] = torch.tensor(values, dtype=BF16, device="cuda")[:, None]
    residual = torch.zeros_like(grad)
    message = torch.empty(1, layout.words, dtype=I32, device="cuda")
    getattr(kernels("ops"), operator)(grad, residual, message, layout=layout, average=0.0)
    assert not residual.any()
    out = torch.full_like(grad, float("nan"))
    getattr(kernels("ops"), f"de{operator}")(message[None], out, layout=layout, divisor=1)
    assert torch.equal(out, grad)


def test_sketches_of_more_than_two_to_the_31_elements():
    n, W = (1 << 31) + 1040, 2
    needs(40)
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
    out = torch.full((n,), float("nan"), dtype=BF16, device="cuda")
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
    kernels("ops").release()
