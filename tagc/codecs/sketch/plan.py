"""Sizes of codec ``sketch``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tagc.codecs.plan import CodecPlan, PlanRequest, aligned
from tagc.codecs.selection.capacity import MIN_SHARED, capacity_for
from tagc.codecs.sketch.config import SketchConfig
from tagc.ops import COUNTS
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import Symbol, resolve_symbol


@dataclass(frozen=True, kw_only=True)
class SketchPlan(CodecPlan):
    """How one segment is sketched.

    Attributes:
        target: the density that the policy asks for.
        layout: the layout of the sketch.
        capacity: the most groups that a rank keeps, per destination.
        levels: largest quantized magnitude that a rank sends.
        shared: whether all ranks keep what the shard's owner chose.
    """

    target: float
    layout: SketchLayout
    capacity: int
    levels: int
    shared: bool = False

    @property
    def density(self) -> float:
        """The target."""
        return self.target

    @property
    def name(self) -> str:
        """'sketch' with the symbol, and 'shared' for a shared support."""
        return f"sketch {self.symbol.name}{' shared' if self.shared else ''}"

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: half a step each, for an element at the threshold.
        (Elements that waited in the residual for several steps may exceed more.)"""
        return min(1.0, 2.0 ** -self.symbol.step_shift(self.levels)) + 2**-8

    def scratch_bytes(self, destinations: int, sources: int) -> int:
        """See :meth:`CodecPlan.scratch_bytes`: the cells of each key, and a table of cells; or the
        places of a shared support's groups."""
        layout = self.layout
        if self.shared:
            # Places in 64 bits, and bits in 32 while they are read.
            return destinations * (16 * layout.groups + 4 * self.capacity) + 4 * layout.groups
        kept = 4 * self.capacity * (1 + self.symbol.lanes)
        return max(kept, layout.keys * (4 * layout.hashes + 24) + 24 * layout.cells)

    def resized(self, columns: int) -> Self:
        """See :meth:`CodecPlan.resized`: for 4 ranks."""
        capacity = capacity_for(self.target, -(-columns // self.symbol.lanes))
        layout = plan_layout(columns, self.symbol, columns if self.shared else 4 * capacity)
        return replace(self, layout=layout, capacity=capacity)

    @property
    def words(self) -> int:
        """Words of the index, or of the sender's next choice in its place."""
        return self.layout.index_words

    @property
    def has_shared_support(self) -> bool:
        return self.shared

    def used_words(self, columns: int) -> int:
        """All words if the support is shared, because a rank sends its choice for its own shard to
        all."""
        return self.words if self.shared else super().used_words(columns)

    @property
    def sent_cells(self) -> int:
        """Cells that travel: the table, or those of a shared support."""
        return self.capacity if self.shared else self.layout.cells

    @property
    def cells(self) -> int:
        """See :attr:`CodecPlan.cells`, with up to 3 cells of padding."""
        return aligned(self.sent_cells)

    @property
    def table_cells(self) -> int:
        return self.layout.cells if self.shared else 0

    @property
    def counts(self) -> int:
        return COUNTS

    @property
    def symbol(self) -> Symbol:
        """Format of a group."""
        return self.layout.symbol

    @property
    def max_boost(self) -> float:
        """Largest factor on the quantization step that lets every kept group send something."""
        return max(1.0, 2.0 ** (self.symbol.step_shift(self.levels) + 1))


def plan_sketch(config: SketchConfig, request: PlanRequest) -> SketchPlan:
    """The sizes of one segment."""
    W, columns = request.world_size, request.columns
    symbol = resolve_symbol(config.symbol, W)
    capacity = capacity_for(config.density, -(-columns // symbol.lanes))
    shared = config.shares_support and capacity >= MIN_SHARED and not request.replicated
    return SketchPlan(
        # A support that all ranks know needs no hashes: every group has its cell in the table.
        layout=plan_layout(columns, symbol, columns if shared else W * capacity),
        target=config.density,
        capacity=capacity,
        levels=symbol.levels(W),
        shared=shared,
        warmup_steps=config.warmup_steps,
        feedback=request.feedback,
    )
