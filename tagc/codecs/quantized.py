"""Codec ``quantized``: every element in a few bits, with a scale per block.

With the feedback kind ``average`` it is LoCo (arXiv 2407.04480) in DeepSpeed's form. Operators hash
the dither's seeds again, so seeds only need to differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from tagc.codecs.config import Block, CodecConfig, unit
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.ops.blocks import BlockLayout
from tagc.ops.fingerprint import MASK, fmix32
from tagc.ops.launches import Dequantize, Quantize
from tagc.ops.program import Launch, Place
from tagc.ops.symbols import wrap_int32
from tagc.ops.torch_operators import Clamp, ScalesAbove, SeedsOf


class QuantizedConfig(CodecConfig):
    """Every element in `bits`, with a scale for every `block` elements; summed in float32.

    With `rounding: stochastic` the rounded values are right on average, and no residual is kept, so
    the codec needs no memory. Runs still repeat bit for bit.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("average", "residual", "none")

    kind: Literal["quantized"] = "quantized"
    """The codec's name."""
    bits: Annotated[Literal[4, 8], unit("bits per element")] = 4
    """Size of an element's code."""
    block: Block = 256
    """How many neighbouring elements share a scale of 16 bits."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest code, or randomly up or down with the right mean; `stochastic` needs feedback
    kind `none`, and makes that kind sound."""

    @property
    def allowed_feedback(self) -> tuple[str, ...]:
        """See :attr:`CodecConfig.allowed_feedback`: stochastic rounding needs no feedback."""
        return ("none",) if self._stochastic else self.feedback_kinds

    @property
    def description(self) -> str:
        return super().description + (" with rounding 'stochastic'" if self._stochastic else "")

    @property
    def _stochastic(self) -> bool:
        return self.rounding == "stochastic"


class QuantizedParametersConfig(CodecConfig):
    """Parameters in `bits`, with a scale for every `block` elements, in FSDP's all-gather.

    An element is off by up to `1 / (2 L)` of the largest magnitude in its block, where `L` is 127
    for 8 bits and 7 for 4 bits. The largest element itself is off by up to `1 / 256`. So an outlier
    turns small neighbours into zeros. Frozen parameters that few bits cannot carry, such as masks,
    are gathered unchanged.

    With `keep_for_backward` a rank keeps the messages that it received in forward, which also hold
    the unit's other parameters, and gathers nothing in backward. (This matters if FSDP reshards
    after forward, and so gathers twice.) It is then an error if parameters change between a forward
    and its backward.
    """

    kind: Literal["quantized"] = "quantized"
    """The codec's name."""
    bits: Annotated[Literal[4, 8], unit("bits per element")] = 8
    """Size of an element's code."""
    block: Block = 256
    """How many neighbouring elements share a scale of 16 bits."""
    keep_for_backward: bool = False
    """Whether ranks keep the forward's messages, so that nothing is gathered in backward."""


@dataclass(frozen=True, kw_only=True)
class QuantizedPlan(CodecPlan):
    """How one segment is quantized.

    Attributes:
        dithered: whether codes are rounded stochastically. Of changes, which only their owner
            encodes, the seeds come from the elements instead of a count of steps.
    """

    layout: BlockLayout
    dithered: bool = False

    @property
    def name(self) -> str:
        changes = "delta " if self.of_changes else ""
        how = " kept" if self.reuses_forward_message else " dithered" if self.dithered else ""
        return f"{changes}quantized int{self.layout.bits}{how}"

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: half a step in each of two messages, or one whole step
        without a residual, and a scale's rounding."""
        return 1 / self.layout.levels + 2**-8

    def cut(self, owners: int) -> tuple[Self, tuple[Cut, ...]]:
        """See :meth:`CodecPlan.cut`: between blocks, so slices have the segment's blocks."""
        length = -(-self.layout.blocks // owners) * self.layout.block
        sliced = replace(self, layout=replace(self.layout, numel=length))
        return sliced, (Cut(columns=self.layout.numel, length=length),)

    @property
    def words(self) -> int:
        return self.layout.words

    def resized(self, columns: int) -> Self:
        return replace(self, layout=replace(self.layout, numel=columns))

    def encoding(
        self, x: Place, message: Place, residual: Place | None = None, seeds: Place | None = None
    ) -> Iterator[Launch]:
        if self.dithered and self.of_changes:
            seeds = Place("seeds_of_content", x.shape[:1], torch.int32)
            yield Launch(SeedsOf(), (x, seeds), self.name)
        average = 0.0 if self.feedback is None or residual is None else self.feedback.old_share
        places = (x, residual, message, seeds) if self.dithered else (x, residual, message)
        yield Launch(Quantize(self.layout, average), places, self.name)

    def summing(self, messages: Place, rows: Place, divisor: int) -> Iterator[Launch]:
        yield Launch(Dequantize(layout=self.layout, divisor=divisor), (messages, rows), self.name)

    def decoding(self, messages: Place, rows: Place) -> Iterator[Launch]:
        operator = Dequantize(layout=self.layout, add=self.of_changes)
        yield Launch(operator, (messages, rows), self.name)
        if rows.dtype == torch.float16 and not self.of_changes:
            # Within a scale's rounding of the largest number; what is not finite is NaN here.
            yield Launch(Clamp(torch.finfo(rows.dtype).max), (rows,), self.name)

    def finding_unfit(self, messages: Place, dtype: torch.dtype, flag: Place) -> Iterator[Launch]:
        """See :meth:`CodecPlan.finding_unfit`. The scales show it; changes are never unfit."""
        if not self.of_changes:
            above = ScalesAbove(self.layout, _largest_scale(dtype, self.layout.levels))
            yield Launch(above, (messages, flag), self.name)


def plan_quantized(
    config: QuantizedConfig | QuantizedParametersConfig, request: PlanRequest
) -> QuantizedPlan:
    """The sizes of one segment."""
    keep = isinstance(config, QuantizedParametersConfig) and config.keep_for_backward
    dithered = isinstance(config, QuantizedConfig) and config.rounding == "stochastic"
    return QuantizedPlan(
        layout=BlockLayout(numel=request.columns, bits=config.bits, block=config.block),
        feedback=request.feedback,
        reuses_forward_message=keep,
        dithered=dithered,
    )


Stage = Literal["gradients", "replicas", "owners", "inside"]
STAGES: tuple[Stage, ...] = ("gradients", "replicas", "owners", "inside")
"""What a rank encodes gradients for: their shards' owners, replicas, as the owner of a slice's sum,
or the ranks of its host."""
_GOLDEN, _STRIDE = 0x9E3779B9, 0x7F4A7C15
SEED_STEP = _GOLDEN - 2**32


def dither_seeds(
    starts: Sequence[int], rows: int, *, unit: int, rank: int, stage: Stage, step: int
) -> Tensor:
    """Seeds of the dither, ``[segments, rows]`` int32. They depend only on the unit, the segment,
    the encoding rank, the stage, the row and the step, so a resumed run continues bit for bit. In
    the next step they are larger by :data:`SEED_STEP`, modulo 2**32.

    Args:
        starts: the first columns of the segments.
        unit: the seed of the unit.
        rank: this process's rank among all.
        stage: what is encoded.
    """
    first = torch.tensor([*starts], dtype=torch.int64, device="cpu")
    # Hash before mixing in the next value: plain sums of different values could coincide.
    mixed = fmix32((first * _STRIDE + unit * _GOLDEN) & MASK)
    mixed = fmix32((mixed ^ (len(STAGES) * rank + STAGES.index(stage))) & MASK)
    each = torch.arange(rows, dtype=torch.int64, device="cpu")
    return wrap_int32(fmix32(mixed[:, None] ^ each) + (step * _GOLDEN & MASK) & MASK)


@cache
def _largest_scale(dtype: torch.dtype, levels: int) -> int:
    """The bits of the largest bfloat16 whose product with ``levels`` is a number of ``dtype``. (A
    NaN's are larger, and scales have no sign.)"""
    largest = torch.tensor(torch.finfo(dtype).max / levels, dtype=torch.float32, device="cpu")
    return int(largest.view(torch.int32)) >> 16
