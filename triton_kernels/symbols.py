"""Symbols: what groups send of their elements, what stays, and the elements back from both.

Per kept element ``q = rint(clip(x / step, -levels, levels))``; the residual becomes
``x - q * step`` and the group's symbol is ``v = Σ qᵢ · 2^(bits·i)``. The step is a power of two, so
products with it and with its inverse are exact. ``float32`` symbols send x itself and leave 0,
unless x is subnormal: then they send 0 and leave x, since the GPU's float32 atomics would take it
for 0.

Worked example (int8x4, step 0.5, levels 3): x = (-0.5, 0.9, 9, 0) gives q = (-1, 2, 3, 0), the
residual (0, -0.1, 7.5, 0) and v = -1 + 2·2^8 + 3·2^16 = 197119; the group counts as clipped.
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import lane_sums, magnitude, rint


@jit
def inverse_of(unit):
    """One over a power of two, float32."""
    return (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@jit
def clips(x, unit, levels):
    """Which groups ``[..., LANES]`` have an element beyond the levels; int32."""
    beyond = tl.abs(x * inverse_of(unit)) > levels
    return tl.max(beyond.to(tl.int32), len(x.shape) - 1)


@jit
def send(x, unit, levels, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Symbols, ``[...]``, of groups ``[..., LANES]`` float32, and what they leave, like ``x``.

    Args:
        unit: the step, a scalar.
        WHOLE: whether symbols are float32, and elements sent as they are; else int32.
    """
    LAST: tl.constexpr = len(x.shape) - 1
    if WHOLE:
        subnormal = magnitude(x) < 0x00800000
        left = tl.where(subnormal & (x != 0.0), x, 0.0)
        symbol = tl.sum(tl.where(subnormal, 0.0, x), LAST)
    else:
        scaled = x * inverse_of(unit)
        q = rint(tl.minimum(tl.maximum(scaled, -levels), levels))
        left = x - q * unit
        symbol = tl.sum(q.to(tl.int32) << (tl.arange(0, LANES) * (32 // LANES)), LAST)
    return symbol, left


@jit
def restore(symbol, left, unit, LANES: tl.constexpr, WHOLE: tl.constexpr):
    """Groups from what :func:`send` made of them: exact below ``2**24`` steps, but that -0 is 0."""
    if WHOLE:
        whole = tl.expand_dims(symbol, -1)
        return tl.where(whole != 0.0, whole, left)
    else:
        q = lane_sums(symbol, LANES).to(tl.float32)
        return tl.where(q != 0.0, left + q * unit, left)
