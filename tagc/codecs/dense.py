"""The ``dense`` codec: columns travel as they are, or as bfloat16, and are summed in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codec_plans import DensePlan
from tagc.plan import UnitPlan


class DenseColumns:
    """The dense columns of a unit that also has compressed ones: they ride in its message.

    See :class:`tagc.codecs.Columns`.
    """

    def __init__(self, plan: UnitPlan) -> None:
        self.words = 0
        self.wire_bytes = 0
        self._parts: list[tuple[slice, slice, DensePlan]] = []
        for segment in plan.of(DensePlan):
            codec = segment.codec
            assert isinstance(codec, DensePlan)
            columns = slice(segment.start, segment.stop)
            self._parts.append((columns, slice(self.words, self.words + codec.words), codec))
            self.words += codec.words

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """See :meth:`tagc.codecs.Columns.encode`."""
        for columns, slot, codec in self._parts:
            elements_of(message[:, slot], codec).copy_(grad[:, columns])

    def start(self, group: dist.ProcessGroup) -> None:
        """Nothing but the message."""

    def wait(self) -> None:
        """Nothing but the message."""

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """See :meth:`tagc.codecs.Columns.decode`."""
        for columns, slot, codec in self._parts:
            wide = torch.float64 if codec.wire == torch.float64 else torch.float32
            total = elements_of(received[:, slot], codec).sum(0, dtype=wide)
            out[columns].copy_(total if divisor == 1 else total / divisor)

    def warm_up(self, out: Tensor) -> None:
        """The owner keeps nothing."""

    def state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to check."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to load."""


def elements_of(words: Tensor, codec: DensePlan) -> Tensor:
    """A view ``[..., numel]`` of the wire's dtype on ``[..., words]`` int32."""
    return words.view(codec.wire)[..., : codec.numel]
