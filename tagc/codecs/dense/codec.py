"""The ``dense`` codec: columns travel as they are, or as bfloat16, and are summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codecs.codec import Codec
from tagc.codecs.dense.plan import DensePlan
from tagc.codecs.exchange import Exchange


class DenseCodec(Codec[DensePlan]):
    """The dense segments of a unit that also has compressed ones: they ride in its message."""

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        """See :meth:`Codec.encode`."""
        self.encode_rows(grad, message)

    def encode_rows(self, rows: Tensor, message: Tensor) -> None:
        """See :meth:`Codec.encode_rows`."""
        for part in self.parts:
            words = message[:, part.words]
            if part.plan.numel * part.plan.wire.itemsize % words.element_size():
                words[:, -1:].zero_()  # elements of 2 bytes leave half of it
            elements_of(words, part.plan).copy_(rows[:, part.columns])

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        """See :meth:`Codec.decode`."""
        for part in self.parts:
            wide = torch.float64 if part.plan.wire == torch.float64 else torch.float32
            total = elements_of(received[:, part.words], part.plan).sum(0, dtype=wide)
            if divisor != 1:
                total /= divisor
            columns = out[part.columns]
            if part.plan.native:
                columns.copy_(total)
                continue
            decoded = part.feedback.decode_buffer(columns)
            decoded.copy_(total)
            part.feedback.correct(decoded, columns)

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_sums`."""
        for part in self.parts:
            wide = torch.float64 if part.plan.wire == torch.float64 else torch.float32
            elements = elements_of(received[..., part.words], part.plan)
            rows[:, part.columns].copy_(elements.sum(1, dtype=wide))

    def decode_rows(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_rows`."""
        for part in self.parts:
            elements = elements_of(received[:, part.words], part.plan)
            if rows.dtype == torch.float16 and not part.plan.native:
                # bfloat16 rounds the largest numbers up, beyond float16's range.
                end = torch.finfo(torch.float16).max
                wide = elements.float()
                elements = torch.where(wide.isfinite(), wide.clamp(-end, end), wide)
            rows[:, part.columns].copy_(elements)


def elements_of(words: Tensor, plan: DensePlan) -> Tensor:
    """A view ``[..., numel]`` of the wire's dtype on ``[..., words]`` int32."""
    return words.view(plan.wire)[..., : plan.numel]
