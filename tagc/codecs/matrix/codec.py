"""The ``matrix`` codec: every element in a few bits, with scales of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codecs.codec import Part
from tagc.codecs.elementwise import ElementwiseCodec
from tagc.codecs.matrix.plan import MatrixPlan


class MatrixCodec(ElementwiseCodec[MatrixPlan]):
    """The segments of a unit that consist of matrices, whose messages follow one another."""

    def _prepare(self, part: Part[MatrixPlan], gradient: torch.dtype) -> None:
        f = part.feedback
        for layout, _, _ in part.plan.runs:
            self._ops.prepare_matrix(layout, gradient, f.residual_dtype, f.old_share)

    def _quantize(
        self, part: Part[MatrixPlan], grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        for layout, columns, words in part.plan.runs:
            self._ops.quantize_matrix(
                grad[:, columns],
                None if residual is None else residual[:, columns],
                message[:, words],
                layout=layout,
                average=part.feedback.old_share,
            )

    def _dequantize(self, plan: MatrixPlan, message: Tensor, out: Tensor, divisor: int) -> None:
        self._dequantize_rows(plan, message[None], out[None], divisor)

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_rows`."""
        for part in self.parts:
            words, elements = received[:, None, part.words], rows[:, part.columns]
            self._dequantize_rows(part.plan, words, elements, divisor=1)

    def _dequantize_rows(
        self, plan: MatrixPlan, message: Tensor, out: Tensor, divisor: int
    ) -> None:
        for layout, columns, words in plan.runs:
            self._ops.dequantize_matrix(
                message[..., words], out[:, columns], layout=layout, divisor=divisor
            )
