"""Steering of thresholds: eager torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.sketch import ABOVE, KEPT, NONZERO, SATURATED
from tagc.ops.thresholds import (
    BIAS_RATE,
    BOOST,
    COARSER,
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
    STEP,
    step_of,
)


def steer(counts: Tensor, target: Tensor, max_boost: Tensor, scale: Tensor, state: Tensor) -> None:
    threshold, boost, bias, exponent, side, _ = state
    above, nonzero, kept, saturated = (
        counts[..., i].float() for i in (ABOVE, NONZERO, KEPT, SATURATED)
    )
    one = torch.ones_like(kept)
    finer = torch.where(saturated * FINER < kept, one * 0.5, one)
    boost.mul_(torch.where(saturated * COARSER > kept, one * 2, finer))
    boost.copy_(boost.clamp(min=1.0).minimum(max_boost[:, None]))
    goal = torch.minimum(target[:, None], nonzero * NONZERO_SHARE).clamp(min=0.5)
    ratio = (above / (goal * bias)).clamp(max=MAX_RATIO)
    near = (ratio > 1 / NEAR) & (ratio < NEAR)
    learnt = torch.where(near, BIAS_RATE * (goal - kept) / goal, 0.0)
    bias.mul_(1 + learnt).clamp_(1.0, MAX_BIAS)

    now = (ratio - 1).sign()
    swung = now * side < 0
    exponent.mul_(torch.where(swung, one * SHORTER, one * LONGER))
    exponent.clamp_(MIN_EXPONENT, MAX_EXPONENT)
    side.copy_(now)
    p = exponent
    factor = ((1 - p) + (1 + p) * ratio) / ((1 + p) + (1 - p) * ratio)
    factor = torch.where(above > 0, factor, NOTHING_ABOVE)
    factor = torch.where(nonzero > 0, factor, 1.0)
    threshold.mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)
    state[STEP] = step_of(threshold, scale[:, None]) * state[BOOST]
