"""Inputs of the operators whose output is a message, and how to compare messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.blocks import BlockLayout
from tagc.codec_plans import SLACK
from tagc.ops import COUNTS, Ops
from tagc.packed import PackedLayout, plan_packed

from ..case import Case

# Ranks whose messages the owner adds up.
RANKS = 2
_SAMPLE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One destination's segment on the device: ``grad`` and ``residual`` ``[1, n]``, ``x`` ``[n]``
    float32, their sum."""

    grad: Tensor
    residual: Tensor
    x: Tensor


def make_row(case: Case, device: torch.device, residual: torch.dtype) -> Row:
    """Normal gradients, and a residual half as large."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(dtype: torch.dtype, scale: float) -> Tensor:
        shape = (1, case.numel)
        return torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype)

    grad, left = normal(case.gradient_dtype, 1.0), normal(residual, 0.5)
    return Row(grad=grad, residual=left, x=grad[0].float() + left[0].float())


def tolerance(row: Row) -> Tensor | float:
    """How far sent plus residual may be from x: what the residual's dtype rounds."""
    return 0.0 if row.residual.dtype == torch.float32 else row.x.abs() * 2.0**-8


def block_layout(case: Case) -> BlockLayout:
    """Blocks of 256."""
    assert case.bits is not None
    return BlockLayout(numel=case.numel, bits=case.bits)


def packed_layout(case: Case) -> PackedLayout:
    """Single elements, with a step's slack."""
    assert case.bits is not None
    assert case.density is not None
    capacity = min(case.numel, int(SLACK * case.density * case.numel) + 1)
    return plan_packed(case.numel, capacity=capacity, bits=case.bits)


def threshold_of(case: Case, x: Tensor) -> Tensor:
    """``[1]``, the size that the share ``density`` of the elements exceeds."""
    assert case.density is not None
    size = x[:: max(1, x.numel() // _SAMPLE)].abs().sort(descending=True).values
    return size[round(case.density * (size.numel() - 1))][None]


def new_message(layout: BlockLayout | PackedLayout, device: torch.device) -> Tensor:
    """``[1, words]``."""
    return torch.zeros(1, layout.words, dtype=torch.int32, device=device)


def pack_row(
    ops: Ops, case: Case, row: Row, layout: PackedLayout, residual: Tensor, message: Tensor
) -> None:
    """One pack."""
    counts = torch.empty(1, COUNTS, dtype=torch.int32, device=message.device)
    threshold = threshold_of(case, row.x)
    ops.pack(row.grad, residual, threshold, None, message, counts, layout=layout)
