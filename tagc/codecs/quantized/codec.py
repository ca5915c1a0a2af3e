"""The ``quantized`` codec: every element in a few bits, with a scale per block.

With the feedback kind ``average`` it is LoCo (arXiv 2407.04480) in DeepSpeed's form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tagc.codecs.codec import CodecSegment, CodecSetup, Part
from tagc.codecs.elementwise import ElementwiseCodec
from tagc.codecs.quantized.dither import Dither, seeds_of
from tagc.codecs.quantized.plan import QuantizedPlan


class QuantizedCodec(ElementwiseCodec[QuantizedPlan]):
    """The quantized segments of a unit, or of what it gathers."""

    def __init__(self, segments: Sequence[CodecSegment[QuantizedPlan]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        counted = [p.columns.start for p in self.parts if p.plan.dithered and not p.plan.by_content]
        self._dither = Dither(setup, counted) if counted else None

    def _prepare(self, part: Part[QuantizedPlan], gradient: torch.dtype) -> None:
        f = part.feedback
        self._ops.prepare_blocks(
            part.plan.layout, gradient, f.residual_dtype, f.old_share, dithered=part.plan.dithered
        )

    def _quantize(
        self, part: Part[QuantizedPlan], grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        layout, average = part.plan.layout, part.feedback.old_share
        seeds = None
        if part.plan.by_content:
            seeds = seeds_of(grad)
        elif self._dither is not None and part.plan.dithered:
            seeds = self._dither.seeds(part.columns.start, self.steps)
        self._ops.quantize(grad, residual, message, layout=layout, average=average, dither=seeds)

    def _dequantize(self, plan: QuantizedPlan, message: Tensor, out: Tensor, divisor: int) -> None:
        self._ops.dequantize(message[None], out[None], layout=plan.layout, divisor=divisor)

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_sums`: sums beyond float16's range are infinite, as the dtype's
        own are."""
        for part in self.parts:
            words, elements = received[..., part.words], rows[:, part.columns]
            self._ops.dequantize(words, elements, layout=part.plan.layout, divisor=1)

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_rows`."""
        for part in self.parts:
            words, elements = received[:, None, part.words], rows[:, part.columns]
            self._ops.dequantize(words, elements, layout=part.plan.layout, divisor=1)
            if rows.dtype == torch.float16:
                # Within a scale's rounding of the largest number; what is not finite is NaN here.
                largest = torch.finfo(rows.dtype).max
                elements.clamp_(-largest, largest)

    def cannot_carry(self, received: Tensor) -> Tensor | None:
        """See :meth:`Codec.cannot_carry`: a scale says so."""
        found = [
            received[:, part.words][:, : part.plan.layout.scale_words].view(torch.int16)
            > _largest_scale(self._setup.dtype, part.plan.layout.levels)
            for part in self.parts
        ]
        return torch.stack([scales.any() for scales in found]).any() if found else None


@cache
def _largest_scale(dtype: torch.dtype, levels: int) -> int:
    """The bits of the largest bfloat16 whose product with ``levels`` is a number of ``dtype``. (A
    NaN's are larger, and scales have no sign.)"""
    largest = torch.tensor(torch.finfo(dtype).max / levels, dtype=torch.float32, device="cpu")
    return int(largest.view(torch.int32)) >> 16
