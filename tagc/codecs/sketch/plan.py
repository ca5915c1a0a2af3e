"""Configuration and sizes of codec ``sketch``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from tagc.codecs.config import CodecConfig, Density, Steps
from tagc.codecs.plan import CodecPlan, PlanRequest, aligned
from tagc.ops.sketch import SketchLayout, plan_layout
from tagc.ops.symbols import Symbol, resolve_symbol

# Capacity relative to the target density: groups that a step selects beyond it wait.
SLACK = 1.0625
# The smallest capacity of a shared support: its window of exploration takes 32 groups.
MIN_SHARED = 64


class SketchConfig(CodecConfig):
    """Kept elements, quantized and summed in a count sketch.

    `density` is the fraction of elements that a rank keeps, in (0, 1]. `symbol` is the group size
    and quantization of one 32-bit symbol; `auto` chooses by the number of ranks.

    With `support: own`, every rank keeps its largest groups, and the sketch has room for their
    union. With `support: shared`, all ranks keep the groups that the shard's owner chose one step
    ahead (with DDP, where no rank owns a shard, it is `own`). The first `warmup_steps` reductions
    are dense, because gradients change fastest at the start of training. (A unit uses the longest
    warm-up of its rules.)
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "none")
    selects: ClassVar[bool] = True

    kind: Literal["sketch"] = "sketch"
    """The codec's name."""
    density: Density
    """Share of the elements that a rank keeps, in the largest groups."""
    symbol: Literal["auto", "int8x4", "int16x2", "int32x1"] = "auto"
    """Contents of 32 bits: int8x4 is 4 elements of 8 bits; auto chooses by the number of ranks."""
    support: Literal["own", "shared"] = "own"
    """Whether a rank keeps its own largest groups, or those that the shard's owner chose."""
    warmup_steps: Steps = 0
    """How many of the first reductions are dense; a unit uses the longest warm-up of its rules."""

    @property
    def shares_support(self) -> bool:
        return self.support == "shared"


def capacity_for(density: float, groups: int) -> int:
    """The most of ``groups`` that a rank keeps per destination: the density plus slack."""
    return min(groups, int(SLACK * density * groups) + 1)


def step_scale(symbol: Symbol, levels: int) -> float:
    """The ratio of the quantization step to the largest power of two up to the threshold."""
    return 2.0 ** -symbol.step_shift(levels)


@dataclass(frozen=True, kw_only=True)
class SketchPlan(CodecPlan):
    """How one segment is sketched.

    Attributes:
        layout: the layout of the sketch.
        capacity: the most groups that a rank keeps, per destination.
        levels: largest quantized magnitude that a rank sends.
        shared: whether all ranks keep what the shard's owner chose.
    """

    layout: SketchLayout
    capacity: int
    levels: int
    shared: bool = False

    @property
    def name(self) -> str:
        return f"sketch {self.symbol.name}{' shared' if self.shared else ''}"

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: half a step each, for an element at the threshold.
        (Elements that waited in the residual for several steps may exceed more.)"""
        return min(1.0, 2.0 ** -self.symbol.step_shift(self.levels)) + 2**-8

    def resized(self, columns: int) -> Self:
        """See :meth:`CodecPlan.resized`: for 4 ranks."""
        capacity = capacity_for(self.density, -(-columns // self.symbol.lanes))
        layout = plan_layout(columns, self.symbol, columns if self.shared else 4 * capacity)
        return replace(self, layout=layout, capacity=capacity)

    @property
    def words(self) -> int:
        """Words of the index, or of the sender's next choice in its place."""
        return self.layout.index_words

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
        density=config.density,
        capacity=capacity,
        levels=symbol.levels(W),
        shared=shared,
        warmup_steps=config.warmup_steps,
        feedback=request.feedback,
    )
