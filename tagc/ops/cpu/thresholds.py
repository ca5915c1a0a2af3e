"""Steers thresholds, one after the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tagc.ops.cpu.arrays import INF, F, bits_of, compiled, float_of, once_a_host
from tagc.ops.sketch import ABOVE, COUNTS, KEPT, NONZERO, SATURATED
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
    STATES,
    STEP,
    THRESHOLD,
)


def steer(counts: Tensor, target: Tensor, max_boost: Tensor, scale: Tensor, state: Tensor) -> None:
    _steer(counts.numpy(), target.numpy(), max_boost.numpy(), scale.numpy(), state.numpy())


@once_a_host
def compile_thresholds() -> None:
    one = torch.ones(1, dtype=torch.float32, device="cpu")
    counts = torch.ones(1, 1, COUNTS, dtype=torch.int32, device="cpu")
    steer(counts, one, one, one, torch.ones(STATES, 1, 1, dtype=torch.float32, device="cpu"))


@compiled
def _steer(counts, target, max_boost, scale, state):
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
            step = float_of(bits_of(threshold) & INF) * scale[i]
            state[THRESHOLD, i, j] = threshold
            state[BOOST, i, j] = boost
            state[EXPONENT, i, j] = p
            state[SIDE, i, j] = side
            state[STEP, i, j] = (step if step > F(0.0) else one) * boost
