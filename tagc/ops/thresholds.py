"""Steering of thresholds: from what a step selected to the thresholds of the next one.

Only the four basic operations and comparisons are used, each rounded by itself, which IEEE 754
rounds the same way everywhere, so that thresholds stay equal to the bit on all ranks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

THRESHOLD, BOOST, BIAS, EXPONENT, SIDE, STEP = range(6)
"""Rows of a state of steering."""
STATES = 6

MIN_THRESHOLD, MAX_THRESHOLD = 2.0**-96, 2.0**96
"""Thresholds stay in here, so that a step and its inverse are normal float32 numbers."""
NONZERO_SHARE = 0.9
"""A threshold below the smallest element would run off to zero: where fewer groups than the target
are not zero, the aim is to leave a tenth of them below it."""
MAX_RATIO = 256.0
FIRST_EXPONENT, MIN_EXPONENT, MAX_EXPONENT = 1 / 4, 1 / 32, 1 / 2
LONGER, SHORTER = 1.25, 0.5
"""What the exponent is multiplied by while the count stays on one side, and where it changes."""
NOTHING_ABOVE = 1 / 16
BIAS_RATE, MAX_BIAS, NEAR = 0.3, 4.0, 4.0
"""The bias learns only while the threshold is about right: elsewhere it would wind up."""
COARSER, FINER = 64.0, 1024.0
"""One kept group in so many may saturate before the step is doubled, and is halved."""


class ThresholdOps(Protocol):
    """Tensors are preallocated, of unit stride in the last dimension."""

    def steer(
        self, counts: Tensor, target: Tensor, max_boost: Tensor, scale: Tensor, state: Tensor
    ) -> None:
        """Move thresholds towards the target, and tie the quantization steps to them.

        With ``above``, ``nonzero``, ``kept`` and ``saturated`` the numbers of groups in ``counts``,
        as float32, and in this order::

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
        around 1, bounded, and free of functions that another library rounds differently.)

        Args:
            counts: ``[segments, D, 4]`` int32, by ``ABOVE``, ``NONZERO``, ``KEPT``, ``SATURATED``;
                none is negative.
            target: ``[segments]`` float32, groups that should be kept.
            max_boost: ``[segments]`` float32 powers of two.
            scale: ``[segments]`` float32 powers of two, or 0 where nothing is quantized: 1 stands
                there for the product that the boost multiplies.
            state: ``[6, segments, D]`` float32, updated: ``THRESHOLD``, ``BOOST``, ``BIAS``,
                ``EXPONENT``, ``SIDE`` and ``STEP``.
        """
        ...

    def prepare_thresholds(self) -> None:
        """Compile what :meth:`steer` will need."""
        ...


def step_of(threshold: Tensor, scale: Tensor | float) -> Tensor:
    """``2**floor(log2(threshold)) * scale``, exactly, and 1 where ``scale`` is 0.

    A power of two makes ``x / step``, ``q * step`` and ``x - q * step`` exact in float32, so what
    is sent plus what stays is what was there, and every implementation gets the same bits.
    Tying it to the threshold rather than to the maximum keeps one outlier from erasing the rest.

    Args:
        threshold: float32, within ``[MIN_THRESHOLD, MAX_THRESHOLD]``.
        scale: a power of two or 0; of a shape that goes with the threshold's.
    """
    exponent = (threshold.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = exponent * scale
    return torch.where(step > 0, step, torch.ones_like(step))
