"""Undoes the lag of error feedback, in one pass."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.ops.cpu.arrays import ABS, INF, F, N, U, bits_of, compiled, numpy_of, once_a_host, store


def undo_lag(decoded: Tensor, sent: Tensor, out: Tensor, *, lead: float) -> None:
    wide = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float16 else out
    _undo_lag(numpy_of(decoded), numpy_of(sent), F(1 - lead), F(lead), numpy_of(wide))
    if wide is not out:
        out.copy_(wide)


@once_a_host
def compile_lag() -> None:
    """Run the operator once for each dtype."""
    sums, sent = torch.zeros(2, 1, dtype=torch.float32, device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        undo_lag(sums, sent, torch.empty(1, dtype=dtype, device="cpu"), lead=0.5)


@compiled
def _undo_lag(decoded, sent, late, share, out):
    for j in range(N(sent.size)):
        x = decoded[j]
        finite = U(bits_of(x) & ABS) < INF
        x = x if finite else F(0.0)
        ahead = (x - sent[j] * late) / share
        sent[j] = x
        store(out, j, ahead if finite else F(np.nan))
