"""The quantization step of a segment: a power of two, tied to the threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops.symbols import Symbol

# Thresholds stay in here, so that a step and its inverse are normal float32 numbers.
MIN_THRESHOLD, MAX_THRESHOLD = 2.0**-96, 2.0**96


def quantization_step(threshold: Tensor, symbol: Symbol, levels: int) -> Tensor:
    """``2**(floor(log2(threshold)) - symbol.step_shift(levels))``, exactly.

    A power of two makes ``x / step``, ``q * step`` and ``x - q * step`` exact in float32, so what
    is sent plus what stays is what was there, and every implementation gets the same bits.
    Tying it to the threshold rather than to the maximum keeps one outlier from erasing the rest.

    Args:
        threshold: float32, within ``[MIN_THRESHOLD, MAX_THRESHOLD]``.

    Returns:
        float32 of the same shape; 1 for symbols that are not quantized.
    """
    if not symbol.integer:
        return torch.ones_like(threshold)
    exponent = (threshold.view(torch.int32) & 0x7F800000).view(torch.float32)
    return exponent * 2.0 ** -symbol.step_shift(levels)
