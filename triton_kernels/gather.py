"""Gather: load x of groups by their keys, after the selection has updated the residual."""

from __future__ import annotations

from .jit import jit, tl
from .scalar import widen


@jit
def load_groups(grad, residual, key, there, n, LANES: tl.constexpr):
    """x of groups of one destination.

    A float32 residual holds x already; otherwise x is the sum of gradient and residual, if any.

    Args:
        grad, residual: first element of the destination; residual may be None.
        key: ``[N]`` int32, groups; read where ``there``.
        n: number of elements of the destination.

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
