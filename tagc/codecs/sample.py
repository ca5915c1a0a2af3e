"""What the codecs' timing samples share: a codec's two steps on its own, without an exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs.selection.threshold import sampled_threshold
from tagc.ops import Ops

ROWS = 4
"""Rows stand for ranks, so that decoding adds up messages as it does in training."""

Step = Callable[[], object]
TimedSteps = tuple[Step, Step]
"""Encoding :attr:`Sample.grad`, and decoding what came of it."""


@dataclass(frozen=True)
class Sample:
    """Inputs that all codecs share.

    Attributes:
        grad: ``[ROWS, columns]``.
        residual: likewise; None where there is none.
        average: see :meth:`tagc.ops.blocks.BlockOps.quantize`.
    """

    ops: Ops
    grad: Tensor
    residual: Tensor | None
    average: float

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.grad.shape[1]

    def empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """A tensor on the sample's device."""
        return torch.empty(*shape, dtype=dtype, device=self.grad.device)

    def threshold(self, group: int, density: float) -> Tensor:
        """One that selects so many groups, by row."""
        return sampled_threshold(self.grad, group, density).clamp(min=1e-6)
