"""Undoes the lag of error feedback: eager torch."""

from __future__ import annotations

import torch
from torch import Tensor


def undo_lag(decoded: Tensor, sent: Tensor, out: Tensor, weights: Tensor) -> None:
    late, share = weights
    lost = ~decoded.isfinite()
    found = decoded.masked_fill(lost, 0.0)
    ahead = (found - sent * late).div_(share)
    sent.copy_(found)
    out.copy_(ahead.masked_fill_(lost, torch.nan))


def prepare_lag() -> None:
    """See :meth:`tagc.ops.lag.LagOps.prepare_lag`; nothing to compile."""
