"""Steering of thresholds: computes the next step's thresholds from this step's counts.

It uses only the four basic operations and comparisons, each rounded by itself. IEEE 754 rounds them
the same way everywhere, so thresholds stay equal to the bit on all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.sketch import ABOVE, KEPT, NONZERO, SATURATED

THRESHOLD, BOOST, BIAS, EXPONENT, SIDE, STEP = range(6)
"""Rows of the state of steering."""
STATES = 6

MIN_THRESHOLD, MAX_THRESHOLD = 2.0**-96, 2.0**96
"""Bounds of thresholds, so that a step and its inverse are normal float32 numbers."""
NONZERO_SHARE = 0.9
"""The goal is at most this share of the groups that are not zero. With a higher goal, the threshold
could fall below the smallest element and run off to zero."""
MAX_RATIO = 256.0
FIRST_EXPONENT, MIN_EXPONENT, MAX_EXPONENT = 1 / 4, 1 / 32, 1 / 2
LONGER, SHORTER = 1.25, 0.5
"""Factors on the exponent: while the count stays on one side of the goal, and when it changes."""
NOTHING_ABOVE = 1 / 16
BIAS_RATE, MAX_BIAS, NEAR = 0.3, 4.0, 4.0
"""The bias learns only while the threshold is about right; otherwise it would wind up."""
COARSER, FINER = 64.0, 1024.0
"""The step doubles if more than one kept group in 64 saturates, and halves if fewer than one in
1024 does."""


def steer(counts: Tensor, target: Tensor, max_boost: Tensor, scale: Tensor, state: Tensor) -> None:
    """Move thresholds towards the target, and set the quantization steps by them.

    ``above``, ``nonzero``, ``kept`` and ``saturated`` are the numbers of groups in ``counts``
    as float32. In this order::

        boost *= 2 if 64 saturated > kept else 1/2 if 1024 saturated < kept else 1
        boost = min(max(boost, 1), max_boost)
        goal = max(min(target, 0.9 nonzero), 1/2)
        ratio = min(above / (goal * bias), 256)
        bias *= 1 + (0.3 (goal - kept) / goal if 1/4 < ratio < 4 else 0), within 1 and 4
        exponent *= 1/2 if sign(ratio - 1) * side < 0 else 5/4, within 1/32 and 1/2
        side = sign(ratio - 1)
        p = exponent
        factor = ((1 - p) + (1 + p) ratio) / ((1 + p) + (1 - p) ratio)
        threshold *= factor (1/16 if nothing is above, 1 if all is zero), within its bounds
        step = 2**floor(log2(threshold)) * scale * boost

    all in float32, each operation rounded by itself. (``factor`` is ``ratio**p`` to first order
    around 1, bounded, and uses no function that libraries round differently.)

    Args:
        counts: ``[segments, D, 4]`` int32, by ``ABOVE``, ``NONZERO``, ``KEPT``, ``SATURATED``;
            not negative.
        target: ``[segments]`` float32, number of groups to keep.
        max_boost: ``[segments]`` float32 powers of two.
        scale: ``[segments]`` float32 powers of two, or 0 where nothing is quantized; there
            ``step`` is ``boost``.
        state: ``[6, segments, D]`` float32, updated: ``THRESHOLD``, ``BOOST``, ``BIAS``,
            ``EXPONENT``, ``SIDE`` and ``STEP``.
    """
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


def step_of(threshold: Tensor, scale: Tensor | float) -> Tensor:
    """``2**floor(log2(threshold)) * scale``, exactly, and 1 where ``scale`` is 0.

    A power of two makes ``x / step``, ``q * step`` and ``x - q * step`` exact in float32. So the
    sent part and the residual add up to ``x``, and every implementation gets the same bits. The
    step follows the threshold, not the maximum, so that one outlier does not erase the rest.

    Args:
        threshold: float32, within ``[MIN_THRESHOLD, MAX_THRESHOLD]``.
        scale: a power of two or 0, of a shape that broadcasts with the threshold's.
    """
    exponent = (threshold.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = exponent * scale
    return torch.where(step > 0, step, torch.ones_like(step))
