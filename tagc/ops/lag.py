"""Undoes the lag of error feedback: the owner's last step with a lead.

Messages carry only a share of gradient plus residual, so the codec's sum is a moving average of
gradients (see :mod:`tagc.codecs.feedback`). The owner inverts it with the last step's sum.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LagOps(Protocol):
    """Tensors are preallocated and have unit stride."""

    def undo_lag(self, decoded: Tensor, sent: Tensor, out: Tensor, weights: Tensor) -> None:
        """Invert a moving average: ``out = (decoded - (1 - K) * sent) / K``. ``decoded`` is copied
        to ``sent``.

        In float32: a product, a difference and a quotient, each rounded by itself (no fused
        multiply-add; IEEE division), then rounded to ``out``'s dtype. Where ``decoded`` is not
        finite, ``out`` is NaN, and ``sent`` becomes 0.

        Args:
            decoded: ``[n]`` float32, the sum (or average) over ranks; may be ``out``.
            sent: ``[n]`` float32, ``decoded`` of the last step, updated in place.
            out: ``[n]`` float32, bfloat16 or float16, written: the optimizer's gradient.
            weights: ``[2]`` float32, ``1 - K`` and ``K``, the share of gradient plus residual that
                messages carry.
        """
        ...

    def prepare_lag(self) -> None:
        """Compile the kernels of :meth:`undo_lag`."""
        ...
