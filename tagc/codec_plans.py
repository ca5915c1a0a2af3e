"""Codecs with their sizes filled in: what one segment of a unit sends, and what it stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tagc.blocks import BlockLayout
from tagc.layout import SketchLayout, plan_layout
from tagc.matrix import MatrixLayout
from tagc.packed import PackedLayout, plan_packed
from tagc.policy_codecs import (
    DenseCodec,
    Feedback,
    MatrixCodec,
    PackedCodec,
    QuantizedCodec,
    QuantizedParameters,
    SketchCodec,
)
from tagc.symbols import Symbol, resolve_symbol

# Room above the target density, per destination: what a step selects beyond it waits a step.
SLACK = 1.0625
# Groups that a shared support must have room for: exploring takes 32 of them.
MIN_SHARED = 64


@dataclass(frozen=True, kw_only=True)
class FeedbackPlan:
    """What a rank stores of what it did not send.

    Attributes:
        dtype: of the stored elements; int8 with a scale for every 256 of them.
        average: share of the old residual that stays; 0 for plain error feedback.
        reset_steps: the residual starts from zero every so many reductions; 0 for never.
        rate: of the moving average that the owner hands out; 0 for none.
        lead: share of what is owed that a message is taken to carry; 1 for all, and then the owner
            does not correct for the rest.
    """

    dtype: torch.dtype
    average: float = 0.0
    reset_steps: int = 0
    rate: float = 0.0
    lead: float = 1.0

    @property
    def working(self) -> torch.dtype:
        """Of the residual in a step."""
        return torch.float32 if self.dtype == torch.int8 else self.dtype

    @property
    def element_bytes(self) -> float:
        """Stored for an element."""
        return self.dtype.itemsize + (2 / 256 if self.dtype == torch.int8 else 0)

    @property
    def hands_out(self) -> bool:
        """Whether the owner keeps something, too: what it hands out is not what it got."""
        return self.rate > 0 or self.lead < 1

    @classmethod
    def of(cls, feedback: Feedback) -> FeedbackPlan | None:
        """None where nothing is stored."""
        if feedback.kind == "none":
            return None
        dtype = getattr(torch, feedback.dtype)
        if feedback.kind == "average":
            return cls(dtype=dtype, average=feedback.beta, reset_steps=feedback.reset_steps)
        if feedback.kind == "momentum":
            return cls(dtype=dtype, rate=feedback.rate)
        return cls(dtype=dtype, lead=feedback.lead)


@dataclass(frozen=True, kw_only=True)
class CodecPlan:
    """What all codecs have in common.

    Attributes:
        warmup_steps: reductions that go dense first.
        feedback: None where nothing is stored.
    """

    warmup_steps: int = 0
    feedback: FeedbackPlan | None = None

    @property
    def name(self) -> str:
        """For people."""
        raise NotImplementedError

    @property
    def words(self) -> int:
        """int32 words of the message to one destination."""
        raise NotImplementedError

    @property
    def cells(self) -> int:
        """32-bit words per destination that are summed on the way, besides the message."""
        return 0

    @property
    def density(self) -> float:
        """Fraction of elements that a rank sends."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DensePlan(CodecPlan):
    """Elements as they are, or rounded to the wire's dtype."""

    numel: int
    wire: torch.dtype
    native: bool = True

    @property
    def name(self) -> str:
        """'dense', with the dtype where it is not the gradient's."""
        return "dense" if self.native else f"dense {str(self.wire).removeprefix('torch.')}"

    @property
    def words(self) -> int:
        """Elements of 2 bytes share words."""
        return -(-self.numel * self.wire.itemsize // 4)


@dataclass(frozen=True, kw_only=True)
class SketchPlan(CodecPlan):
    """How one segment is sketched.

    Attributes:
        target: density that the policy asks for.
        capacity: groups that a rank keeps at most, per destination.
        levels: largest quantized magnitude that a rank sends.
        shared: whether all ranks keep what the shard's owner chose.
    """

    layout: SketchLayout
    target: float
    capacity: int
    levels: int
    shared: bool = False

    @property
    def name(self) -> str:
        """With the symbol."""
        return f"sketch {self.symbol.name}{' shared' if self.shared else ''}"

    @property
    def density(self) -> float:
        """The target."""
        return self.target

    @property
    def words(self) -> int:
        """The index, or the owner's next choice in its place."""
        return self.layout.index_words

    @property
    def cells(self) -> int:
        """The table."""
        return self.layout.cells

    @property
    def symbol(self) -> Symbol:
        """Format of a group."""
        return self.layout.symbol

    @property
    def max_boost(self) -> float:
        """Largest factor on the quantization step that lets every kept group send something."""
        if not self.symbol.integer:
            return 1.0
        return max(1.0, 2.0 ** (self.symbol.step_shift(self.levels) + 1))


@dataclass(frozen=True, kw_only=True)
class PackedPlan(CodecPlan):
    """How one segment's kept elements are packed.

    Attributes:
        target: density that the policy asks for.
        shared: whether all ranks keep what the shard's owner chose.
    """

    layout: PackedLayout
    target: float
    shared: bool

    @property
    def name(self) -> str:
        """With bits and group."""
        group = f"x{self.layout.group}" if self.layout.group > 1 else ""
        return f"packed int{self.layout.values.bits}{group}{' shared' if self.shared else ''}"

    @property
    def density(self) -> float:
        """The target."""
        return self.target

    @property
    def words(self) -> int:
        """Header, index, values."""
        return self.layout.words


@dataclass(frozen=True, kw_only=True)
class QuantizedPlan(CodecPlan):
    """How one segment is quantized."""

    layout: BlockLayout
    keep_for_backward: bool = False

    @property
    def name(self) -> str:
        """With the bits."""
        return f"quantized int{self.layout.bits}{' kept' if self.keep_for_backward else ''}"

    @property
    def words(self) -> int:
        """Scales and codes."""
        return self.layout.words


@dataclass(frozen=True, kw_only=True)
class MatrixPlan(CodecPlan):
    """How the matrices of one segment are quantized, one after the other.

    Attributes:
        layouts: of each parameter's part of a shard.
    """

    layouts: tuple[MatrixLayout, ...]

    @property
    def name(self) -> str:
        """With bits or group, and level."""
        first = self.layouts[0]
        level = f" level {first.level:g}" if first.level != 1 else ""
        size = f"1 of {first.group}" if first.group > 1 else f"int{first.bits}"
        return f"matrix {size}{level}"

    @property
    def words(self) -> int:
        """Scales and codes of all of them."""
        return sum(layout.words for layout in self.layouts)

    @property
    def pieces(self) -> Iterator[tuple[MatrixLayout, slice, slice]]:
        """Each with its columns of the segment and its words of the message."""
        column = word = 0
        for layout in self.layouts:
            columns = slice(column, column + layout.numel)
            words = slice(word, word + layout.words)
            yield layout, columns, words
            column, word = columns.stop, words.stop


ResolvedCodec = (
    SketchCodec | PackedCodec | QuantizedCodec | MatrixCodec | DenseCodec | QuantizedParameters
)


def plan_codec(
    codec: ResolvedCodec,
    feedback: Feedback,
    *,
    columns: int,
    world_size: int,
    dtype: torch.dtype,
    matrices: Sequence[tuple[int, int]] = (),
) -> CodecPlan:
    """Sizes of a codec for ``columns`` elements per destination, summed over ``world_size`` ranks.

    Args:
        dtype: of the buffer that the segment is a part of.
        matrices: rows and columns of what a shard has of every parameter; for ``MatrixCodec``.
    """
    if columns == 0 or isinstance(codec, DenseCodec):
        native = columns == 0 or not codec.compresses
        wire = dtype if native else torch.bfloat16
        return DensePlan(numel=columns, wire=wire, native=native)
    stored = FeedbackPlan.of(feedback)
    if isinstance(codec, QuantizedCodec | QuantizedParameters):
        return QuantizedPlan(
            layout=BlockLayout(numel=columns, bits=codec.bits, block=codec.block),
            feedback=stored,
            keep_for_backward=isinstance(codec, QuantizedParameters) and codec.keep_for_backward,
        )
    if isinstance(codec, MatrixCodec):
        return MatrixPlan(
            layouts=tuple(
                MatrixLayout(
                    rows=rows, columns=n, bits=codec.bits, group=codec.group, level=codec.level
                )
                for rows, n in matrices
            ),
            warmup_steps=codec.warmup_steps,
            feedback=stored,
        )
    if isinstance(codec, PackedCodec):
        capacity = capacity_for(codec.density, -(-columns // codec.group))
        return PackedPlan(
            layout=plan_packed(
                columns,
                capacity=capacity,
                group=codec.group,
                bits=codec.bits,
                block=codec.block,
            ),
            target=codec.density,
            shared=_shared(codec, capacity),
            warmup_steps=codec.warmup_steps,
            feedback=stored,
        )
    symbol = resolve_symbol(codec.symbol, world_size)
    capacity = capacity_for(codec.density, -(-columns // symbol.lanes))
    shared = _shared(codec, capacity)
    return SketchPlan(
        # What all ranks keep is its own union.
        layout=plan_layout(columns, symbol, capacity if shared else world_size * capacity),
        target=codec.density,
        capacity=capacity,
        levels=symbol.levels(world_size),
        shared=shared,
        warmup_steps=codec.warmup_steps,
        feedback=stored,
    )


def _shared(codec: SketchCodec | PackedCodec, capacity: int) -> bool:
    return codec.support == "shared" and capacity >= MIN_SHARED


def capacity_for(density: float, groups: int) -> int:
    """Groups that a rank keeps at most of so many: the density's share, and the slack."""
    return min(groups, int(SLACK * density * groups) + 1)
