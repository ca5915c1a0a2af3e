"""Groups: load them, quantize them to symbols and residuals, and restore the elements from both.

A kept element sends ``q = rint(clip(x / step, -levels, levels))``. Its residual becomes
``x - q * step``, and the group's symbol is ``v = Σ qᵢ · 2^(bits·i)``. The step is a power of two,
so products with it and with its inverse are exact.

Worked example (int8x4, step 0.5, levels 3): x = (-0.5, 0.9, 9, 0) gives q = (-1, 2, 3, 0), the
residual (0, -0.1, 7.5, 0) and v = -1 + 2·2^8 + 3·2^16 = 197119; the group counts as clipped.
"""

from __future__ import annotations

from .jit import jit, tl
from .scalar import lane_sums, rint, widen


@jit
def load_groups(grad, residual, key, there, n, LANES: tl.constexpr):
    """x of the groups ``key`` (``[N]`` int32) of one destination with ``n`` elements, after the
    selection. A float32 residual holds x already; otherwise x is the sum of gradient and residual,
    if any.

    Returns:
        x ``[N, LANES]`` float32, 0 for missing elements; the elements' places, int64; whether they
        exist.
    """
    j = key.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = there[:, None] & (j < n)
    if residual is not None and residual.dtype.element_ty == tl.float32:
        x = tl.load(residual + j, mask=inside, other=0.0)
    else:
        x = widen(tl.load(grad + j, mask=inside, other=0.0))
        if residual is not None:
            x += widen(tl.load(residual + j, mask=inside, other=0.0))
    return x, j, inside


@jit
def inverse_of(unit):
    """One over a power of two, float32."""
    return (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@jit
def clips(x, unit, levels):
    """Whether groups ``[..., LANES]`` have an element beyond the levels; int32."""
    beyond = tl.abs(x * inverse_of(unit)) > levels
    return tl.max(beyond.to(tl.int32), len(x.shape) - 1)


@jit
def send(x, unit, levels, LANES: tl.constexpr):
    """Symbols, ``[...]`` int32, of groups ``[..., LANES]`` float32, and the quantization errors.

    Args:
        unit: the step, a scalar.
    """
    scaled = x * inverse_of(unit)
    q = rint(tl.minimum(tl.maximum(scaled, -levels), levels))
    shifted = q.to(tl.int32) << (tl.arange(0, LANES) * (32 // LANES))
    return tl.sum(shifted, len(x.shape) - 1), x - q * unit


@jit
def restore(symbol, left, unit, LANES: tl.constexpr):
    """The inverse of :func:`send`: exact below ``2**24`` steps, except that -0 becomes 0."""
    q = lane_sums(symbol, LANES).to(tl.float32)
    return tl.where(q != 0.0, left + q * unit, left)
