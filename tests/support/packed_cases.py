"""Cases for packed sparse messages: slices of wider buffers; outputs are poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from support import oracle
from support.marks import slow
from support.trials import PACKED, RARER_PACKED
from tagc.ops import get_ops
from tagc.ops.bitmap import to_bitmap
from tagc.ops.blocks import BlockLayout
from tagc.ops.packed import HEADER, PackedLayout, plan_packed

OPS = CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LOW_BITS = (0, 1, 2, 4, 8, 16)
both = pytest.mark.parametrize("ops", OPS, ids=["cpu", "reference"])
VARIANTS = PACKED
RARER = RARER_PACKED
variants = pytest.mark.parametrize(
    ("group", "bits", "grad_dtype", "residual_dtype"),
    [*VARIANTS, *(slow(*rarer) for rarer in RARER)],
    ids=lambda v: str(v).removeprefix("torch."),
)
# share of the groups above the threshold, share that the capacity holds
MODES = {
    "usual": (0.1, 0.12),
    "overflow": (0.4, 0.2),
    "nothing fits": (0.3, 0.0),
    "empty": (0.0, 0.1),
    "room for all": (0.2, 1.0),
}


@dataclass
class Case:
    """Arguments of a pack of ``R`` rows."""

    grad: Tensor
    residual: Tensor | None
    threshold: Tensor
    layout: PackedLayout

    @property
    def x(self) -> Tensor:
        if self.residual is None:
            return self.grad.float()
        return self.grad.float() + self.residual.float()


@dataclass
class Packed:
    """Outputs of a pack."""

    message: Tensor
    counts: Tensor
    residual: Tensor | None

    def index(self, layout: PackedLayout) -> Tensor:
        return self.message[:, HEADER : HEADER + layout.index_words]


def make_case(n, R, block, variant, mode, rng, *, low_bits=None, spoilt=False) -> Case:
    group, bits, grad_dtype, residual_dtype = variant
    above, room = MODES[mode]
    values = oracle.spread if spoilt else oracle.values
    grad = values((R, n), rng).to(grad_dtype)
    residual = None
    if residual_dtype is not None:
        residual = oracle.values((R, n), rng).to(residual_dtype)
    if spoilt and n:
        for value in (math.nan, math.inf, -math.inf, 1e-45, -0.0):
            grad[0, rng.integers(n)] = value
        grad[0, -1] = 3.4028234e38
    groups = -(-n // group)
    capacity = int(room * groups)
    layout = plan_packed(n, capacity=capacity, group=group, bits=bits, block=block)
    if low_bits is not None:
        layout = replace(layout, low_bits=low_bits)
    case = Case(
        oracle.widened(grad),
        None if residual is None else oracle.widened(residual),
        torch.ones(R),
        layout,
    )
    if groups:
        x = case.x.nan_to_num(0, 0, 0).abs()
        whole = torch.nn.functional.pad(x, (0, groups * group - n)).unflatten(1, (groups, -1))
        size = whole.amax(-1).sort(1, descending=True).values
        case.threshold = size[:, min(groups - 1, round(above * groups))].clamp(min=2.0**-140)
    if mode == "empty":
        case.threshold = torch.full((R,), math.inf)
    return case


def pack(ops, case: Case) -> Packed:
    rows, layout = case.grad.shape[0], case.layout
    residual = None if case.residual is None else oracle.widened(case.residual)
    message = oracle.widened(oracle.poisoned(rows, layout.words, dtype=torch.int32))
    counts = oracle.poisoned(rows, 4, dtype=torch.int32)
    before = case.grad.clone()
    ops.pack(case.grad, residual, case.threshold, message, counts, layout=layout)
    oracle.check_margins(message, residual)
    assert oracle.same_bits(case.grad, before)
    return Packed(message, counts, residual)


def unpack(ops, message, layout, dtype=F32, divisor=1) -> Tensor:
    out = oracle.widened(oracle.poisoned(layout.numel, dtype=dtype))
    ops.unpack(message, out, layout=layout, divisor=divisor)
    oracle.check_margins(out)
    return out


def index_of(ops, groups: list[list[int]], layout: PackedLayout) -> Tensor:
    """Rows of groups, encoded."""
    marked = torch.zeros(len(groups), layout.groups, dtype=torch.bool)
    for row, members in zip(marked, groups, strict=True):
        row[members] = True
    index = oracle.widened(oracle.poisoned(len(groups), layout.index_words, dtype=torch.int32))
    ops.write_index(oracle.widened(to_bitmap(marked)), index, layout=layout)
    oracle.check_margins(index)
    return index


def layout_of(groups: int, capacity: int, low_bits: int, group: int = 1) -> PackedLayout:
    values = BlockLayout(numel=capacity * group, bits=8, block=32)
    return PackedLayout(
        numel=groups * group, group=group, capacity=capacity, low_bits=low_bits, values=values
    )


def written_out(groups: list[int], layout: PackedLayout) -> list[int]:
    """An index as two large integers."""
    low = high = 0
    for i, g in enumerate(groups):
        low |= g % 2**layout.low_bits << i * layout.low_bits
        high |= 1 << ((g >> layout.low_bits) + i if layout.low_bits else g)
    words = [low >> 32 * w & oracle.MASK for w in range(layout.low_words)]
    words += [high >> 32 * w & oracle.MASK for w in range(layout.high_words)]
    assert low >> 32 * layout.low_words == high >> 32 * layout.high_words == 0
    return [oracle.signed(w, 32) for w in words]
