"""The Triton operators on a GPU: nothing waits for it, graphs, sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from support.edges import BF16, I32, matrix, random_matrix
from support.kernel_cases import kernels
from support.sync import synchronizing_raises
from support.trials import Case, Trial, one_of_each
from tagc.ops import get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.matrix import MatrixLayout
from tagc.ops.sketch import plan_layout
from tagc.ops.symbols import SYMBOLS

pytest.importorskip("triton.language", reason="Triton is for Linux on x86-64")
pytestmark = pytest.mark.gpu
REFERENCE = get_ops("cpu", "reference")


def on_the_device(case: Case) -> dict[str, Tensor | None]:
    return {n: None if x is None else x.cuda() for n, x in case.tensors.items()}


def call(case: Case, tensors: dict[str, Tensor | None]) -> None:
    getattr(kernels("ops"), case.call.operator)(**tensors, **dict(case.call.options))


@pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.call.operator)
def test_nothing_waits_for_the_device(case: Case):
    if case.call.operator == "peel":
        pytest.skip("its results are chosen by a mask")
    tensors = on_the_device(case)
    call(case, tensors)
    with synchronizing_raises():
        call(case, tensors)


@pytest.mark.parametrize("case", one_of_each(), ids=lambda case: case.call.operator)
def test_a_cuda_graph_holds_a_call(case: Case):
    if case.call.operator == "peel":
        pytest.skip("its results are new tensors")
    tensors, graph = on_the_device(case), torch.cuda.CUDAGraph()
    call(case, tensors)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call(case, tensors)
    kernels("ops").release()
    want = case.run(REFERENCE, Tensor.clone)
    for _ in range(2):
        for name, x in case.tensors.items():
            if x is not None:
                given = tensors[name]
                assert given is not None
                given.copy_(x)
        graph.replay()
        for name, x in want.items():
            got = tensors[name]
            assert got is not None
            torch.testing.assert_close(got.cpu(), x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "columns"), [(512, 4096), (3, 16384), (2048, 1500)])
@pytest.mark.parametrize(("bits", "group"), [(1, 1), (2, 1), (1, 8)])
def test_large_matrices(bits, group, rows, columns):
    """Sizes of a model's layers: many programs, long lanes."""
    x = random_matrix((2, rows, columns), np.random.default_rng(0)).to(BF16)
    trial = Trial("", (lambda: matrix(x, bits, group, x.clone(), dtype=BF16),))
    trial.check(kernels("ops"), torch.device("cuda"), "aligned")


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


def test_blocks_of_more_than_two_to_the_31_elements():
    n = (1 << 31) + 1040
    needs(24)
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


def test_matrices_of_more_than_two_to_the_31_elements():
    rows, columns = (1 << 17) + 1, 1 << 14
    needs(24)
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
