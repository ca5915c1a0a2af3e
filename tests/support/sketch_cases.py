"""Cases for the operators of sketches: every tensor is a slice of a wider buffer, as it is in a
unit's messages; outputs are poisoned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from support.marks import slow
from support.trials import RARER_SKETCHES, SKETCHES
from tagc.codecs.sketch.plan import quantization_step
from tagc.ops import get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
VARIANTS = SKETCHES
RARER = RARER_SKETCHES
variants = pytest.mark.parametrize(
    ("symbol", "grad_dtype", "residual_dtype"),
    [*VARIANTS, *(slow(*rarer) for rarer in RARER)],
    ids=lambda v: str(v).removeprefix("torch."),
)
SIZES = [1, 2, 3, 31, 33, 127, 128, 129, 258]
# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.12),
    "overflow": (0.4, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "all above": (1.0, 0.5),
    "room for all": (0.2, 1.0),
}


@dataclass
class Case:
    """Arguments of an encode of ``W`` rows."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    step: Tensor
    seed: Tensor
    layout: SketchLayout
    levels: int
    capacity: int
    support: Tensor | None = None


@dataclass
class Encoded:
    """Outputs of an encode."""

    index: Tensor
    cells: Tensor
    counts: Tensor
    residual: Tensor | None


def make_case(n, W, symbol, grad_dtype, residual_dtype, mode, rng, keys=None) -> Case:
    above, room = MODES[mode]
    symbol = SYMBOLS[symbol]
    grad = oracle.values((W, n), rng).to(grad_dtype)
    residual = None if residual_dtype is None else oracle.values((W, n), rng).to(residual_dtype)
    groups = -(-n // symbol.lanes)
    x = grad.float() if residual is None else grad.float() + residual.float()
    whole = torch.nn.functional.pad(x, (0, groups * symbol.lanes - n)).unflatten(1, (groups, -1))
    size = whole.abs().amax(-1).sort(1, descending=True).values
    threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-20)
    if mode == "empty":
        threshold = torch.full((W,), 2.0**20)
    levels = symbol.levels(W)
    capacity = int(room * groups)
    return Case(
        oracle.widened(grad),
        None if residual is None else oracle.widened(residual),
        threshold,
        quantization_step(threshold, symbol, levels),
        torch.from_numpy(rng.integers(-(2**31), 2**31, 1, dtype=np.int32)),
        plan_layout(n, symbol, W * capacity if keys is None else keys),
        levels,
        capacity,
    )


def encode(ops, case: Case) -> Encoded:
    W, layout = case.grad.shape[0], case.layout
    residual = None if case.residual is None else oracle.widened(case.residual)
    index = oracle.widened(oracle.poisoned(W, layout.index_words, dtype=torch.int32))
    cells = oracle.widened(oracle.poisoned(W, layout.cells, dtype=torch.int32))
    counts = oracle.poisoned(W, 4, dtype=torch.int32)
    before = case.grad.clone()
    ops.encode(
        case.grad, residual, case.threshold, case.step, case.seed, index, cells, counts,
        layout=layout, levels=case.levels, capacity=case.capacity, support=case.support,
    )  # fmt: skip
    oracle.check_margins(residual, index, cells)
    assert oracle.same_bits(case.grad, before)
    return Encoded(index, cells, counts, residual)


def decode(ops, index, cells, case: Case, out_dtype, divisor):
    """``out``, the residual of row 0 afterwards, ``stats``."""
    out = oracle.widened(oracle.poisoned(case.layout.numel, dtype=out_dtype))
    residual = None if case.residual is None else oracle.widened(case.residual[0])
    stats = oracle.poisoned(2, dtype=torch.int32)
    ops.decode(
        index, oracle.widened(cells), case.step[:1], case.seed, out, residual, stats,
        layout=case.layout, divisor=divisor,
    )  # fmt: skip
    oracle.check_margins(out, residual)
    return out, residual, stats


def spoil(case: Case, rng) -> None:
    """Non-finite gradients in row 0 only."""
    n = case.grad.shape[1]
    for bad in (float("nan"), float("inf"), float("-inf")):
        case.grad[0, int(rng.integers(n))] = bad


def check_against_oracle(case: Case, got: Encoded) -> None:
    layout = case.layout
    for d in range(case.grad.shape[0]):
        x = case.grad[d].float()
        if case.residual is not None:
            x = x + case.residual[d].float()
        support = None
        if case.support is not None:
            support = oracle.bits_of(case.support[d].numpy(), layout.groups)
        row = oracle.encode_row(
            x.numpy(), case.threshold[d].item(), case.step[d].item(), int(case.seed), layout,
            case.levels, case.capacity, support,
        )  # fmt: skip
        assert oracle.bits_of(got.index[d, :-1].numpy(), layout.words * 32) == row.present
        assert got.index[d, -1] == row.poison
        assert tuple(got.counts[d].tolist()) == row.counts
        assert got.cells[d].tolist() == row.cells
        if case.residual is not None and got.residual is not None:
            bf16 = case.residual.dtype == BF16
            left = torch.from_numpy(oracle.to_bfloat16(row.left) if bf16 else row.left)
            bad = torch.from_numpy(row.bad)
            expected = torch.where(bad, case.residual[d].float(), left)
            assert torch.equal(got.residual[d].float(), expected)


def same(a: Encoded, b: Encoded) -> None:
    assert torch.equal(a.index, b.index)
    assert torch.equal(a.counts, b.counts)
    assert torch.equal(a.cells, b.cells)
    if a.residual is not None and b.residual is not None:
        assert oracle.same_bits(a.residual, b.residual)


def share(case: Case, rng, *, bad: bool = False) -> None:
    """A support of a third of the groups, zeros among them; ``bad`` makes some not finite."""
    W, groups, lanes = len(case.grad), case.layout.groups, case.layout.symbol.lanes
    marked = torch.from_numpy(rng.random((W, groups)) < 1 / 3)
    if bad:
        for at, value in ((0, float("nan")), (groups - 1, float("inf"))):
            marked[0, at] = True
            case.grad[0, at * lanes] = value
        # One outside of it, too, if there is room.
        if groups > 2:
            marked[0, 1] = False
            case.grad[0, lanes] = float("-inf")
    support = to_bitmap(marked)
    if groups % 32:
        support[:, -1] |= torch.tensor(-1 << groups % 32, dtype=torch.int32)  # means nothing
    case.support = oracle.widened(support)


def ranks_to_one(case: Case, ops=REFERENCE):
    """The index and summed cells that rank 0 receives if every row of ``case`` is one rank's."""
    got = encode(ops, case)
    return got.index, got.cells.sum(0, dtype=got.cells.dtype)
