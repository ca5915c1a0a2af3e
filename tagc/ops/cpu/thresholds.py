"""Steering of thresholds."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels import thresholds
from tagc.ops.sketch import COUNTS
from tagc.ops.thresholds import STATES


def steer(counts: Tensor, target: Tensor, max_boost: Tensor, scale: Tensor, state: Tensor) -> None:
    """See :meth:`tagc.ops.thresholds.ThresholdOps.steer`."""
    thresholds.steer(
        counts.numpy(), target.numpy(), max_boost.numpy(), scale.numpy(), state.numpy()
    )


@once_a_host
def _compile() -> None:
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    counts = torch.ones(1, 1, COUNTS, dtype=torch.int32, device="cpu")
    steer(counts, one, one, one, torch.ones(STATES, 1, 1, dtype=torch.float32, device="cpu"))


def prepare_thresholds() -> None:
    """See :meth:`tagc.ops.thresholds.ThresholdOps.prepare_thresholds`; takes a second."""
    _compile()
