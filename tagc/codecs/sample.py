"""The basis of the codecs' timing samples: a codec's two steps, without an exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs.selection.threshold import sampled_threshold
from tagc.ops import Ops

ROWS = 4
"""Rows stand for ranks, so decoding sums messages as it does in training."""

Step = Callable[[], object]
TimedSteps = tuple[Step, Step]
"""A step that encodes :attr:`Sample.grad`, and one that decodes the messages."""


@dataclass(frozen=True)
class Sample:
    """Inputs that all codecs share.

    Attributes:
        grad: ``[ROWS, columns]``.
        residual: ``[ROWS, columns]``; None without feedback.
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
        """Thresholds ``[ROWS]`` that select about the share ``density`` of the groups."""
        return sampled_threshold(self.grad, group, density).clamp(min=1e-6)
