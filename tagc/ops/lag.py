"""The owner's last step where messages carry only a share of what ranks owe: undoing the lag.

What the codec delivers is a moving average of gradients, see :mod:`tagc.codecs.feedback.error`; its
owner inverts it with the help of the last sum.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LagOps(Protocol):
    """Tensors are preallocated, of unit stride."""

    def undo_lag(self, decoded: Tensor, sent: Tensor, out: Tensor, weights: Tensor) -> None:
        """Invert a moving average: ``out = (decoded - (1 - K) * sent) / K``; ``decoded`` is kept in
        ``sent``.

        In float32: a product, a difference and a quotient, each rounded by itself (no fused
        multiply-add; IEEE division), then rounded to ``out``'s dtype. Where ``decoded`` is not
        finite, ``out`` is NaN, and ``sent`` becomes 0.

        Args:
            decoded: ``[n]`` float32, the sum (or average) over ranks; may be ``out``.
            sent: ``[n]`` float32, that of the last step, updated in place.
            out: ``[n]`` float32, bfloat16 or float16, written: what the optimizer gets.
            weights: ``[2]`` float32, ``1 - K`` and ``K``, the share of what is owed that messages
                carry.
        """
        ...

    def prepare_lag(self) -> None:
        """Compile what :meth:`undo_lag` will need."""
        ...
