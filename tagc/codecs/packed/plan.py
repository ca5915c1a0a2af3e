"""Sizes of codec ``packed``."""

from __future__ import annotations

from dataclasses import dataclass

from tagc.codecs.packed.config import PackedConfig
from tagc.codecs.plan import PlanRequest
from tagc.codecs.selection.capacity import capacity_for
from tagc.codecs.selection.plan import SelectingPlan
from tagc.ops.packed import PackedLayout, plan_packed


@dataclass(frozen=True, kw_only=True)
class PackedPlan(SelectingPlan):
    """How one segment's kept elements are packed."""

    layout: PackedLayout

    @property
    def name(self) -> str:
        """With bits and group."""
        group = f"x{self.layout.group}" if self.layout.group > 1 else ""
        return f"packed int{self.layout.values.bits}{group}"

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: half a step each, and a scale's rounding. (What waited
        for several steps and is then sent may exceed more.)"""
        return 1 / self.layout.values.levels + 2**-8

    def scratch_bytes(self, destinations: int, sources: int, *, reference: bool) -> int:
        """See :meth:`CodecPlan.scratch_bytes`: the reference's of one row; else keys and values."""
        if reference:
            return 72 * self.layout.groups * self.layout.group
        return 4 * max(1, sources) * self.layout.capacity * (1 + self.layout.group)

    @property
    def words(self) -> int:
        """Header, index, values."""
        return self.layout.words


def plan_packed_codec(config: PackedConfig, request: PlanRequest) -> PackedPlan:
    """The sizes of one segment."""
    capacity = capacity_for(config.density, -(-request.columns // config.group))
    return PackedPlan(
        layout=plan_packed(
            request.columns,
            capacity=capacity,
            group=config.group,
            bits=config.bits,
            block=config.block,
        ),
        target=config.density,
        warmup_steps=config.warmup_steps,
        feedback=request.feedback,
    )
