"""Contract of the operators of quantized matrices, see :mod:`tagc.matrix` for the format."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tagc.matrix import MatrixLayout


class MatrixOps(Protocol):
    """Tensors are preallocated; outputs may hold garbage before. Rows need unit stride only in
    their last dimension; messages may be slices of wider buffers."""

    def quantize_matrix(
        self,
        grad: Tensor,
        residual: Tensor | None,
        message: Tensor,
        *,
        layout: MatrixLayout,
        average: float,
    ) -> None:
        """Accumulate and quantize one matrix for each destination, and keep in the residual what
        the codes do not say.

        Per destination, all in float32, of ``x = float32(grad) + float32(residual)``, and ``u``,
        the magnitude of ``x``, at most ``LARGEST``, or 0 where it is not finite:

        1. the sum of ``u`` over each column, in ``COLUMN_LANES`` lanes, and over each row, in
           ``ROW_LANES``;
        2. with ``t`` the float32 bits of a column's sum plus 2**21, shifted right by 22, the
           column's 4 bits are ``t - max(t) + 15``, at least 0;
        3. ``a`` is the largest sum of the rows that are finite, divided by that of ``v`` in
           ``ROW_LANES`` lanes. The base is 8 times its biased exponent, minus ``CENTRE``; 0 if
           ``a`` is below ``MIN_MEAN``, and then all rows that are finite say ``NOTHING``;
        4. what codes stand for: all elements, or of each group the first with the largest
           ``|x * (1 / v)|`` (which rounds twice; the last group of a row may be short);
        5. the row's scale: where ``fitted``, the sum over codes of ``u * v``, in ``ROW_LANES``
           lanes, divided by that of ``v * v``, likewise; else the row's sum divided by that of
           ``v``. Times ``float32(distance)``, and with ``t`` the bits of that plus 2**19, shifted
           right by 20, the row's byte is ``t - base``, at most 254, and ``NOTHING`` if that is
           below 1. ``NOT_FINITE`` if the row has an element that is not finite. What is
           ``NOTHING`` or ``NOT_FINITE`` has the codes 0;
        6. codes are ``floor(y * 0.5)``, clipped, with ``y = (x * (1 / f)) * (1 / v)``, which
           rounds four times; with a group the place in it, and ``group`` more where ``x`` there
           has its sign bit set;
        7. ``left = x - (2 q + 1) * f * v``, or ``x`` minus or plus ``f * v`` where a code points,
           rounded once; becomes the residual as in
           :meth:`tagc.ops.blocks.BlockOps.quantize`. Rows that are not finite keep theirs.

        Args:
            grad: ``[D, rows * columns]`` float32, bfloat16 or float16.
            residual: ``[D, rows * columns]`` float32 or bfloat16, updated in place; None for no
                feedback.
            message: ``[D, words]`` int32, written; padding is 0.
            average: share of the old residual that stays, in [0, 1); LoCo's beta.
        """
        ...

    def dequantize_matrix(
        self, message: Tensor, out: Tensor, *, layout: MatrixLayout, divisor: int
    ) -> None:
        """Add up messages: ``out = (sum over r of what message r says) / divisor``.

        Terms are exact in float32; they are added in the order of ``r``, starting from the first,
        then divided (IEEE), then rounded to ``out``'s dtype. What no group's code points at, and
        rows that say nothing, are +0. Rows that are not finite are NaN.

        Args:
            message: ``[R, words]`` int32.
            out: ``[rows * columns]`` float32, bfloat16 or float16, written.
        """
        ...

    def prepare_matrix(
        self,
        layout: MatrixLayout,
        gradient: torch.dtype,
        residual: torch.dtype | None,
        average: float,
    ) -> None:
        """Compile what :meth:`quantize_matrix` and :meth:`dequantize_matrix` will need."""
        ...
