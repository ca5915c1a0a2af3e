"""The kernel that undoes the lag of error feedback, in one pass."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import float_bits
from tagc.ops.cpu.kernels.scalar import N, U, compiled, store


@compiled
def undo_lag(decoded, sent, late, share, out):
    """See :meth:`tagc.ops.lag.LagOps.undo_lag`.

    Args:
        decoded: ``[n]`` float32; may be ``out``.
        sent: ``[n]`` float32, updated.
        late, share: float32, ``1 - K`` and ``K``.
        out: ``[n]`` float32 or the bits of bfloat16 as uint16, written.
    """
    zero, nan = np.float32(0.0), np.float32(np.nan)
    for j in range(N(sent.size)):
        x = decoded[j]
        finite = U(float_bits(x) & U(0x7FFFFFFF)) < U(0x7F800000)
        x = x if finite else zero
        ahead = (x - sent[j] * late) / share
        sent[j] = x
        store(out, j, ahead if finite else nan)
