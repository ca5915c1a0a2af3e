"""The sketch operators' input: a gradient, a residual, and what a training step would derive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tagc.codecs.selection.capacity import SLACK
from tagc.codecs.selection.quantization_step import quantization_step
from tagc.ops import COUNTS, Ops, get_ops
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import SYMBOLS

from ..case import Case

# Ranks whose sum must fit: sets the quantization levels.
_RANKS = 2
_SAMPLE = 1 << 20


def ours(device: torch.device) -> tuple[Ops, str]:
    """The implementation that is measured on a device, and its name."""
    name = "triton" if device.type == "cuda" else "cpu"
    return get_ops(device, name), {"triton": "Triton", "cpu": "numba, one thread"}[name]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One destination's segment on the device.

    Attributes:
        grad: ``[1, n]``.
        residual: ``[1, n]``, before the step.
        x: ``[n]`` float32, their sum.
        threshold, step, seed: as ``encode`` takes them.
        element_threshold: 0-dimensional; the share ``density`` of the elements lies above.
        kept: groups that the density asks for.
    """

    case: Case
    grad: Tensor
    residual: Tensor
    x: Tensor
    threshold: Tensor
    step: Tensor
    seed: Tensor
    element_threshold: Tensor
    kept: int
    layout: SketchLayout
    levels: int
    capacity: int

    @property
    def index_bytes(self) -> float:
        """One bit per group."""
        return self.layout.groups / 8

    @property
    def tolerance(self) -> Tensor | float:
        """How far sent plus residual may be from x: what the dtypes round, element by element."""
        return 0.0 if self.case.residual == "float32" else self.x.abs() * 2.0**-8

    def outputs(self) -> Outputs:
        """New buffers for one implementation of ``encode``."""
        layout, device = self.layout, self.grad.device
        return Outputs(
            residual=self.residual.clone(),
            index=torch.empty(1, layout.index_words, dtype=torch.int32, device=device),
            cells=torch.empty(1, layout.cells, dtype=torch.int32, device=device),
            counts=torch.empty(1, COUNTS, dtype=torch.int32, device=device),
        )

    def encode(self, ops: Ops, to: Outputs) -> None:
        """One encode."""
        ops.encode(
            self.grad, to.residual, self.threshold, self.step, self.seed, to.index, to.cells,
            to.counts, layout=self.layout, levels=self.levels, capacity=self.capacity,
        )  # fmt: skip

    def decode(self, ops: Ops, index: Tensor, cells: Tensor, out: Tensor, stats: Tensor) -> None:
        """One decode of what a single rank sent; the divisor is 1."""
        ops.decode(
            index, cells, self.step, self.seed, out, None, stats, layout=self.layout, divisor=1
        )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What ``encode`` writes."""

    residual: Tensor
    index: Tensor
    cells: Tensor
    counts: Tensor


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Normal gradients, a residual half as large, and the exact quantile as threshold."""
    assert case.symbol is not None
    assert case.density is not None
    symbol, n = SYMBOLS[case.symbol], case.numel
    generator = torch.Generator(device).manual_seed(0)

    def normal(dtype: torch.dtype, scale: float) -> Tensor:
        return torch.randn(1, n, generator=generator, device=device).mul_(scale).to(dtype)

    grad, residual = normal(case.gradient_dtype, 1.0), normal(case.residual_dtype, 0.5)
    x = grad[0].float() + residual[0].float()
    groups = n // symbol.lanes
    kept = max(1, round(case.density * groups))
    threshold = _quantile(x.view(groups, symbol.lanes), case.density)[None]
    capacity, levels = int(SLACK * case.density * groups) + 1, symbol.levels(_RANKS)
    return Inputs(
        case=case,
        grad=grad,
        residual=residual,
        x=x,
        threshold=threshold,
        step=quantization_step(threshold, symbol, levels),
        seed=torch.zeros(1, dtype=torch.int32, device=device),
        element_threshold=_quantile(x[:, None], case.density),
        kept=kept,
        layout=plan_layout(n, symbol, capacity),
        levels=levels,
        capacity=capacity,
    )


def _quantile(groups: Tensor, density: float) -> Tensor:
    """The size that the share ``density`` of the groups ``[groups, lanes]`` exceeds."""
    stride = max(1, groups.shape[0] // _SAMPLE)
    size = groups[::stride].abs().amax(1).sort(descending=True).values
    return size[round(density * (size.numel() - 1))]


def difference(got: Tensor, want: Tensor, tolerance: Any, what: str) -> str | None:
    """What to say if ``got`` is further from ``want`` than allowed, else None."""
    excess = ((got.float() - want.float()).abs() - tolerance).max().item()
    # A NaN is no small difference.
    return None if excess <= 0 else f"{what} (off by {excess:.3g} more than rounding)"
