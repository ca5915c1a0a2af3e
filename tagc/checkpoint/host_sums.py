"""The sums of :mod:`tagc.checkpoint.sums` on a CPU, compiled."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.arrays import compiled


@compiled
def add_up(rows, weights, sums):
    """The sums of ``rows`` ``[n, words]`` int32, to ``sums`` ``[n, 2]`` int64."""
    for i in range(rows.shape[0]):
        first = second = np.int64(0)
        for j in range(rows.shape[1]):
            word = np.int64(rows[i, j])
            first += word * weights[0, j]
            second += word * weights[1, j]
        sums[i, 0] = first
        sums[i, 1] = second
