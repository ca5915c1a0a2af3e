"""Contract of the operators of block quantization, see :mod:`tagc.blocks` for the format."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tagc.blocks import BlockLayout


class BlockOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before. Rows need unit stride only in
    their last dimension; messages may be slices of wider buffers."""

    def quantize(
        self,
        grad: Tensor,
        residual: Tensor | None,
        message: Tensor,
        *,
        layout: BlockLayout,
        average: float,
    ) -> None:
        """Accumulate and quantize rows, and keep in the residual what the codes do not say.

        Per block of ``x = float32(grad) + float32(residual)`` with largest magnitude ``m``:

        1. the scale is ``s = bfloat16(m * float32(1 / levels))``, rounded to nearest even and at
           most the largest finite one; 0 if that is below ``MIN_SCALE``; NaN (0x7FC0) if ``m`` is
           not finite, and then the block's codes are 0 and its residual stays as it was;
        2. codes are ``q = rint(clip(x * (1 / s), -levels, levels))``, 0 where ``s`` is 0;
        3. with ``left = x - q * s`` (exact), the residual becomes ``left`` if ``average`` is 0,
           else ``float32(average) * residual + float32(1 - average) * left`` (three roundings, no
           fused multiply-add), rounded to nearest even in its dtype (finite stays finite).

        Args:
            grad: ``[R, numel]`` float32, bfloat16 or float16.
            residual: ``[R, numel]`` float32 or bfloat16, updated in place; None for no feedback.
            message: ``[R, words]`` int32, written; padding in codes and scales is 0.
            average: share of the old residual that stays, in [0, 1); LoCo's beta.
        """
        ...

    def dequantize(
        self, message: Tensor, out: Tensor, *, layout: BlockLayout, divisor: int
    ) -> None:
        """Add up messages: ``out[k] = (sum over r of q * s) / divisor``.

        Products are exact in float32; they are added in float32 in the order of ``r``, starting
        from the first, then divided (IEEE), then rounded to ``out``'s dtype. A NaN scale makes
        its whole block NaN.

        Args:
            message: ``[K, R, words]`` int32.
            out: ``[K, numel]`` float32, bfloat16 or float16, written.
        """
        ...

    def prepare_blocks(
        self,
        layout: BlockLayout,
        gradient: torch.dtype,
        residual: torch.dtype | None,
        average: float,
    ) -> None:
        """Compile what :meth:`quantize` and :meth:`dequantize` will need."""
        ...
