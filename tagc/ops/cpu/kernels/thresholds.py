"""The kernel that steers thresholds, one after the other."""

from __future__ import annotations

import numpy as np

from tagc.ops.cpu.kernels.llvm import bits_float, float_bits
from tagc.ops.cpu.kernels.scalar import U, compiled
from tagc.ops.sketch import ABOVE, KEPT, NONZERO, SATURATED
from tagc.ops.thresholds import (
    BIAS,
    BIAS_RATE,
    BOOST,
    COARSER,
    EXPONENT,
    FINER,
    LONGER,
    MAX_BIAS,
    MAX_EXPONENT,
    MAX_RATIO,
    MAX_THRESHOLD,
    MIN_EXPONENT,
    MIN_THRESHOLD,
    NEAR,
    NONZERO_SHARE,
    NOTHING_ABOVE,
    SHORTER,
    SIDE,
    STEP,
    THRESHOLD,
)

F = np.float32


@compiled
def steer(counts, target, max_boost, scale, state):
    """See :meth:`tagc.ops.thresholds.ThresholdOps.steer`."""
    one = F(1.0)
    for i in range(counts.shape[0]):
        for j in range(counts.shape[1]):
            above, nonzero = F(counts[i, j, ABOVE]), F(counts[i, j, NONZERO])
            kept, saturated = F(counts[i, j, KEPT]), F(counts[i, j, SATURATED])
            boost = state[BOOST, i, j]
            if saturated * F(COARSER) > kept:
                boost *= F(2.0)
            elif saturated * F(FINER) < kept:
                boost *= F(0.5)
            boost = min(max(boost, one), max_boost[i])
            goal = max(min(target[i], nonzero * F(NONZERO_SHARE)), F(0.5))
            ratio = min(above / (goal * state[BIAS, i, j]), F(MAX_RATIO))
            bias = state[BIAS, i, j]
            if F(1 / NEAR) < ratio < F(NEAR):
                bias *= one + F(BIAS_RATE) * (goal - kept) / goal
            state[BIAS, i, j] = min(max(bias, one), F(MAX_BIAS))
            side = F(np.sign(ratio - one))
            swung = side * state[SIDE, i, j] < F(0.0)
            p = state[EXPONENT, i, j] * (F(SHORTER) if swung else F(LONGER))
            p = min(max(p, F(MIN_EXPONENT)), F(MAX_EXPONENT))
            factor = F(NOTHING_ABOVE)
            if above > F(0.0):
                factor = ((one - p) + (one + p) * ratio) / ((one + p) + (one - p) * ratio)
            if nonzero <= F(0.0):
                factor = one
            threshold = state[THRESHOLD, i, j] * factor
            threshold = min(max(threshold, F(MIN_THRESHOLD)), F(MAX_THRESHOLD))
            step = bits_float(U(float_bits(threshold) & U(0x7F800000))) * scale[i]
            state[THRESHOLD, i, j] = threshold
            state[BOOST, i, j] = boost
            state[EXPONENT, i, j] = p
            state[SIDE, i, j] = side
            state[STEP, i, j] = (step if step > F(0.0) else one) * boost
