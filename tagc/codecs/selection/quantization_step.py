"""The quantization step of a segment: a power of two, tied to the threshold."""

from __future__ import annotations

from torch import Tensor

from tagc.ops.symbols import Symbol
from tagc.ops.thresholds import step_of


def step_scale(symbol: Symbol, levels: int) -> float:
    """The ratio of the quantization step to the largest power of two up to the threshold."""
    return 2.0 ** -symbol.step_shift(levels)


def quantization_step(threshold: Tensor, symbol: Symbol, levels: int) -> Tensor:
    """``2**(floor(log2(threshold)) - symbol.step_shift(levels))``, exactly.

    Args:
        threshold: float32, within the bounds of :mod:`tagc.ops.thresholds`.

    Returns:
        float32 of the same shape.
    """
    return step_of(threshold, step_scale(symbol, levels))
