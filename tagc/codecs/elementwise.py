"""The base of the codecs that send every element in few bits: ``quantized`` and ``matrix``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, P, Part
from tagc.codecs.exchange import Exchange
from tagc.codecs.state import check_counter


class ElementwiseCodec(Codec[P]):
    """State and step of segments that are sent in full.

    Attributes:
        steps: encodings so far, for feedback ``average`` and stochastic rounding.
    """

    def __init__(self, segments: Sequence[CodecSegment[P]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        self.steps = 0
        self.prepare(setup.dtype)

    def prepare(self, dtype: torch.dtype) -> None:
        """Compile the operators for rows of a dtype."""
        for part in self.parts:
            self._prepare(part, dtype)

    def _prepare(self, part: Part[P], gradient: torch.dtype) -> None:
        """Compile the operators for gradients of a dtype."""
        raise NotImplementedError

    def _quantize(
        self, part: Part[P], grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        """Encode ``grad`` and ``residual`` ``[D, columns]`` to ``message`` ``[D, words]``."""
        raise NotImplementedError

    def _dequantize(
        self, plan: P, message: Tensor, out: Tensor, divisor: int, *, add: bool = False
    ) -> None:
        """Decode ``message`` ``[K, W, words]``; write the sums over ``divisor`` to ``out``
        ``[K, columns]``, or add them to it."""
        raise NotImplementedError

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        self.encode_rows(grad, message)

    def encode_rows(self, rows: Tensor, message: Tensor) -> None:
        for part in self.parts:
            gradient = rows[:, part.columns]
            with part.feedback.opened(gradient, self.steps) as residual:
                self._quantize(part, gradient, residual, message[:, part.words])
        self.steps += 1

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        for part in self.parts:
            columns = out[part.columns]
            decoded = part.feedback.decode_buffer(columns)
            self._dequantize(part.plan, received[None, :, part.words], decoded[None], divisor)
            part.feedback.correct(decoded, columns)

    def decode_rows(self, received: Tensor, rows: Tensor, *, add: bool = False) -> None:
        """See :meth:`Codec.decode_rows`.

        Args:
            add: whether to add to ``rows``, in float32, rounded once.
        """
        for part in self.parts:
            words, elements = received[:, None, part.words], rows[:, part.columns]
            self._dequantize(part.plan, words, elements, divisor=1, add=add)

    def skip(self, steps: int) -> None:
        self.steps += steps

    def state(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self.steps, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        check_counter("steps", state["steps"])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])
