"""Codec ``dense``: columns are sent uncompressed, or as bfloat16, and summed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from tagc.codecs.config import CodecConfig, Special
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.ops.dense import DenseLayout, Piece
from tagc.ops.launches import Put, Sum
from tagc.ops.program import Launch, Place


class DenseConfig(CodecConfig):
    """The gradient, uncompressed, through the ordinary reduce-scatter.

    With `wire: bfloat16` it is rounded to 16 bits to be sent, and summed in float32.
    """

    kind: Literal["dense"] = "dense"
    """The codec's name."""
    wire: Literal["native", "bfloat16"] = "native"
    """What is sent: the gradient's own dtype, or bfloat16."""

    @property
    def compresses(self) -> bool:
        return self.wire != "native"

    def carries(self, special: Special) -> bool:
        """See :meth:`CodecConfig.carries`. bfloat16 carries what FSDP's own mixed precision does,
        except values at the edge of their dtype."""
        return not self.compresses or special is not Special.LARGE


@dataclass(frozen=True, kw_only=True)
class DensePlan(CodecPlan):
    """Elements in their own dtype, or rounded to the wire's dtype."""

    numel: int
    wire: torch.dtype

    @property
    def name(self) -> str:
        """'dense', with the wire's dtype if it is not the buffer's own."""
        return f"dense {str(self.wire).removeprefix('torch.')}" if self.compressed else "dense"

    @property
    def words(self) -> int:
        """Words of all elements; elements of 2 bytes share words."""
        return -(-self.numel * self.wire.itemsize // 4)

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]]:
        """See :meth:`CodecPlan.cut`: anywhere."""
        length = -(-self.numel // owners)
        return replace(self, numel=length), (Cut(columns=self.numel, length=length),)

    def resized(self, columns: int) -> Self:
        return replace(self, numel=columns)

    def encoding(
        self, x: Place, message: Place, residual: Place | None = None, seeds: Place | None = None
    ) -> Iterator[Launch]:
        yield Launch(Put(self._layout), (x, message, None), self.name)

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        yield Launch(Sum(layout=self._layout), (messages, rows, None, None), self.name)

    def summing(self, messages: Place, rows: Place, divisor: int) -> Iterator[Launch]:
        total = Sum(layout=self._layout, divisor=divisor)
        yield Launch(total, (messages, rows, None, None), self.name)

    @property
    def _layout(self) -> DenseLayout:
        return DenseLayout(self.wire, (Piece(0, self.numel, 0),))

    def used_words(self, columns: int) -> int:
        """Words of the filled elements."""
        return replace(self, numel=columns).words


def plan_dense(config: DenseConfig, request: PlanRequest) -> DensePlan:
    """The sizes of one segment."""
    wire = torch.bfloat16 if config.compresses else request.dtype
    return DensePlan(numel=request.columns, wire=wire, compressed=config.compresses)
