"""Marked: load x of the groups that a bitmap marks, after the selection went over the residual."""

from __future__ import annotations

from .jit import jit, tl
from .scalar import bits_of, load_words, widen


@jit
def load_marked(
    grad, residual, index, first, n, words, LANES: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """x of the marked groups among words ``first`` to ``first + WORDS`` of one destination.

    A float32 residual holds x already; otherwise x is the sum of gradient and residual, if any.

    Args:
        grad, residual: first element of the destination; residual may be None.
        index: first word of the destination.

    Returns:
        marked ``[WORDS, 32]`` bool; x ``[WORDS, 32, LANES]`` float32, 0 where not marked; the
        elements' distance from the first one here; which of them are marked and exist.
    """
    w = tl.arange(0, WORDS)
    marked = bits_of(load_words(index + first + w, w < words - first))
    group = tl.expand_dims(w, 1) * 32 + tl.arange(0, 32)
    j = tl.expand_dims(group, 2) * LANES + tl.arange(0, LANES)
    start = first * (32 * LANES)
    inside = tl.expand_dims(marked, 2) & (j < n - start)
    if residual is not None and residual.dtype.element_ty == tl.float32:
        x = tl.load(residual + start + j, mask=inside, other=0.0)
    else:
        x = widen(tl.load(grad + start + j, mask=inside, other=0.0))
        if residual is not None:
            x += widen(tl.load(residual + start + j, mask=inside, other=0.0))
    return marked, x, j, inside
