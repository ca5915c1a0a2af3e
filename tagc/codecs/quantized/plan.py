"""Sizes of codec ``quantized``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.codecs.quantized.config import QuantizedConfig, QuantizedParametersConfig
from tagc.ops.blocks import BlockLayout


@dataclass(frozen=True, kw_only=True)
class QuantizedPlan(CodecPlan):
    """How one segment is quantized.

    Attributes:
        keep_for_backward: whether the message of a forward serves its backward, too.
        dithered: whether codes are rounded by chance.
        by_content: whether that chance comes from the elements themselves, and not from a count of
            steps: parameters are encoded now and then, by their owner alone.
    """

    layout: BlockLayout
    keep_for_backward: bool = False
    dithered: bool = False
    by_content: bool = False

    @property
    def name(self) -> str:
        """With the bits."""
        dithered = " dithered" if self.dithered else ""
        return f"quantized int{self.layout.bits}{' kept' if self.keep_for_backward else dithered}"

    @property
    def reuses_forward_message(self) -> bool:
        """See :attr:`CodecPlan.reuses_forward_message`."""
        return self.keep_for_backward

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: half a step each, or a whole one that owes nothing, and
        a scale's rounding."""
        return 1 / self.layout.levels + 2**-8

    def scratch_bytes(self, destinations: int, sources: int, *, reference: bool) -> int:
        """See :meth:`CodecPlan.scratch_bytes`: codes as int64, and the rest in float32."""
        padded = self.layout.blocks * self.layout.block
        each = 49 if self.dithered else 41
        return padded * max(each * destinations, 16 * sources) if reference else 0

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]]:
        """See :meth:`CodecPlan.cut`: between blocks, which are the segment's own."""
        length = -(-self.layout.blocks // owners) * self.layout.block
        sliced = replace(self, layout=replace(self.layout, numel=length))
        return sliced, (Cut(columns=self.layout.numel, length=length),)

    @property
    def words(self) -> int:
        """Scales and codes."""
        return self.layout.words


def plan_quantized(
    config: QuantizedConfig | QuantizedParametersConfig, request: PlanRequest
) -> QuantizedPlan:
    """The sizes of one segment."""
    keep = isinstance(config, QuantizedParametersConfig) and config.keep_for_backward
    dithered = isinstance(config, QuantizedConfig) and config.rounding == "stochastic"
    return QuantizedPlan(
        layout=BlockLayout(numel=request.columns, bits=config.bits, block=config.block),
        feedback=request.feedback,
        keep_for_backward=keep,
        dithered=dithered,
    )
