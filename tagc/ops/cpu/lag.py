"""Undoes the lag of error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.cpu.arrays import numpy_of
from tagc.ops.cpu.compiling import once_a_host
from tagc.ops.cpu.kernels import lag


def undo_lag(decoded: Tensor, sent: Tensor, out: Tensor, weights: Tensor) -> None:
    """See :meth:`tagc.ops.lag.LagOps.undo_lag`."""
    wide = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    late, share = weights.numpy()
    lag.undo_lag(numpy_of(decoded), numpy_of(sent), late, share, numpy_of(wide))
    if wide is not out:
        out.copy_(wide)


@once_a_host
def _compile() -> None:
    """Run the operator once for each dtype."""
    weights = torch.full((2,), 0.5, dtype=torch.float32, device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        sums, sent = weights[:1].clone(), weights[1:].clone()
        undo_lag(sums, sent, torch.empty(1, dtype=dtype, device="cpu"), weights)


def prepare_lag() -> None:
    """See :meth:`tagc.ops.lag.LagOps.prepare_lag`; takes a second."""
    _compile()
