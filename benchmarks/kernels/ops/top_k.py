"""Baseline: ``torch.topk`` of the groups' sizes, values and positions gathered."""

from __future__ import annotations

from torch import Tensor

from tagc.ops.sketch import SketchLayout


class TopK:
    """Keeps the ``k`` largest groups exactly, in float32, with error feedback.

    It selects the groups that the sketch would; for symbols of one element that is plain top-k.
    """

    def __init__(self, layout: SketchLayout, k: int) -> None:
        lanes = layout.symbol.lanes
        self._shape, self._k = (layout.groups, lanes), k
        self.note = "single elements" if lanes == 1 else f"groups of {lanes} by their largest |x|"
        self._index: Tensor | None = None
        self._values: Tensor | None = None

    def encode(self, grad: Tensor, residual: Tensor) -> None:
        """Values ``[k, lanes]`` and positions ``[k]``, and the new residual ``[n]``."""
        x = (grad.float() + residual.float()).view(self._shape)
        self._index = x.abs().amax(1).topk(self._k, sorted=False).indices
        self._values = x[self._index]
        x[self._index] = 0.0
        residual.copy_(x.view(-1))

    def decode(self, out: Tensor) -> None:
        """Zeros, and the values in their places, ``[n]``."""
        assert self._index is not None
        assert self._values is not None
        out.zero_()
        out.view(self._shape)[self._index] = self._values.to(out.dtype)
