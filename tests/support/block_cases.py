"""Cases for blocks in few bits: every tensor is a slice of a wider buffer; outputs are poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from support import oracle
from support.marks import slow
from support.trials import BLOCKS, RARER_BLOCKS
from tagc.ops import get_ops
from tagc.ops.blocks import BlockLayout

OPS = CPU, REFERENCE = get_ops("cpu", "cpu"), get_ops("cpu", "reference")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
both = pytest.mark.parametrize("ops", OPS, ids=["cpu", "reference"])
VARIANTS = BLOCKS
RARER = RARER_BLOCKS
variants = pytest.mark.parametrize(
    ("bits", "grad_dtype", "residual_dtype"),
    [*VARIANTS, *(slow(*rarer) for rarer in RARER)],
    ids=lambda v: str(v).removeprefix("torch."),
)
SIZES = [1, 31, 32, 33, 255, 257, 1000]


@dataclass
class Case:
    """Arguments of a quantization."""

    grad: Tensor
    residual: Tensor | None
    layout: BlockLayout

    @property
    def x(self) -> Tensor:
        if self.residual is None:
            return self.grad.float()
        return self.grad.float() + self.residual.float()


def make_case(n, R, block, variant, rng, *, spoilt=False) -> Case:
    bits, grad_dtype, residual_dtype = variant
    grad = oracle.spread((R, n), rng).to(grad_dtype)
    residual = None
    if residual_dtype is not None:
        residual = (oracle.spread((R, n), rng) if spoilt else oracle.values((R, n), rng)).to(
            residual_dtype
        )
    if spoilt and n:
        for value in (math.nan, math.inf, -math.inf, 3.4028234e38, -3.4028234e38, 1e-45, -0.0):
            grad[rng.integers(R), rng.integers(n)] = value
    elif grad_dtype == F16:
        grad = grad.clamp(-60000, 60000)
    return Case(
        oracle.widened(grad),
        None if residual is None else oracle.widened(residual),
        BlockLayout(numel=n, bits=bits, block=block),
    )


def quantize(ops, case: Case, average=0.0) -> tuple[Tensor, Tensor | None]:
    """The message, and the residual afterwards."""
    residual = None if case.residual is None else oracle.widened(case.residual)
    rows = case.grad.shape[0]
    message = oracle.widened(oracle.poisoned(rows, case.layout.words, dtype=torch.int32))
    before = case.grad.clone()
    ops.quantize(case.grad, residual, message, layout=case.layout, average=average)
    oracle.check_margins(message, residual)
    assert oracle.same_bits(case.grad, before)
    return message, residual


def dequantize(ops, message: Tensor, layout: BlockLayout, dtype=F32, divisor=1) -> Tensor:
    out = oracle.widened(oracle.poisoned(message.shape[0], layout.numel, dtype=dtype))
    ops.dequantize(message, out, layout=layout, divisor=divisor)
    oracle.check_margins(out)
    return out


def test_words_of_a_layout():
    layout = BlockLayout(numel=1000, bits=4, block=256)
    assert layout.levels == 7
    assert layout.blocks == 4
    assert (layout.scale_words, layout.block_words) == (2, 32)
    assert layout.words == 2 + 4 * 32
    odd = BlockLayout(numel=513, bits=8, block=256)
    assert (odd.levels, odd.blocks, odd.scale_words, odd.words) == (127, 3, 2, 2 + 3 * 64)
    assert BlockLayout(numel=0, bits=8).words == 0
