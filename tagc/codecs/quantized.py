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

from tagc.codecs.codec import STAGES, CodecSegment, CodecSetup, Part
from tagc.codecs.config import Block, CodecConfig, unit
from tagc.codecs.elementwise import ElementwiseCodec
from tagc.codecs.kind import CodecKind
from tagc.codecs.plan import CodecPlan, Cut, PlanRequest
from tagc.codecs.sample import ROWS, Sample, TimedSteps
from tagc.ops.blocks import BlockLayout
from tagc.ops.hashing import MASK, fmix32
from tagc.ops.launches import Clamp, Dequantize, Quantize, ScalesAbove, SeedsOf, seeds_of
from tagc.ops.program import Launch, Place
from tagc.ops.symbols import wrap_int32


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
    def spelled(self) -> str:
        return super().spelled + (" with rounding 'stochastic'" if self._stochastic else "")

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
        keep_for_backward: whether a backward reuses its forward's messages.
        dithered: whether codes are rounded stochastically.
        by_content: whether the dither's seeds come from the elements instead of a count of steps;
            for changes of parameters, which only their owner encodes.
    """

    layout: BlockLayout
    keep_for_backward: bool = False
    dithered: bool = False
    by_content: bool = False

    @property
    def name(self) -> str:
        """'quantized' with the bits."""
        dithered = " dithered" if self.dithered else ""
        return f"quantized int{self.layout.bits}{' kept' if self.keep_for_backward else dithered}"

    @property
    def reuses_forward_message(self) -> bool:
        return self.keep_for_backward

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
        """Words of scales and codes."""
        return self.layout.words

    def encoding(self, x: Place, message: Place) -> Iterator[Launch]:
        seeds = ()
        if self.dithered:
            assert self.by_content
            seeds = (Place("seeds", x.shape[:1], torch.int32),)
            yield Launch(SeedsOf(), (x, *seeds), self.name)
        quantize = Quantize(self.layout, dithered=self.dithered)
        yield Launch(quantize, (x, None, message, *seeds), self.name)

    def decoding(self, messages: Place, rows: Place, *, add: bool = False) -> Iterator[Launch]:
        dequantize = Dequantize(layout=self.layout, add=add)
        yield Launch(dequantize, (messages, rows), self.name)
        if rows.dtype == torch.float16 and not add:
            # Within a scale's rounding of the largest number; what is not finite is NaN here.
            yield Launch(Clamp(torch.finfo(rows.dtype).max), (rows,), self.name)

    def finding_unfit(self, messages: Place, dtype: torch.dtype, flag: Place) -> Iterator[Launch]:
        """See :meth:`CodecPlan.finding_unfit`. The scales show it."""
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
        keep_for_backward=keep,
        dithered=dithered,
    )


_GOLDEN, _STRIDE = 0x9E3779B9, 0x7F4A7C15


class Dither:
    """Seeds of the dither, for segments of a unit. They depend only on the unit, the segment, the
    encoding rank, the stage, the row and the step, so a resumed run continues bit for bit.
    """

    def __init__(self, setup: CodecSetup, columns: Sequence[int]) -> None:
        """Make seeds for the segments that begin at these columns of their unit."""
        self._places = {column: i for i, column in enumerate(columns)}
        starts = torch.tensor([*columns], dtype=torch.int64, device=setup.device)
        rows = torch.arange(setup.destinations, dtype=torch.int64, device=setup.device)
        # Hash before mixing in the next value: plain sums of different values could coincide.
        mixed = fmix32((starts * _STRIDE + setup.seed * _GOLDEN) & MASK)
        mixed = fmix32((mixed ^ (STAGES * setup.rank + setup.stage)) & MASK)
        self._first = wrap_int32(fmix32(mixed[:, None] ^ rows))
        self._step: int | None = None
        self._seeds = torch.empty_like(self._first)

    def seeds(self, column: int, step: int) -> Tensor:
        """The seeds ``[D]`` int32 of the segment that begins at ``column``."""
        if self._step != step:
            # One small kernel per unit. Sums wrap around on purpose.
            turn = step * _GOLDEN & MASK
            torch.add(self._first, turn - (turn >> 31 << 32), out=self._seeds)
            self._step = step
        return self._seeds[self._places[column]]


class QuantizedCodec(ElementwiseCodec[QuantizedPlan]):
    """The quantized segments of a unit's gradients or parameters."""

    def __init__(self, segments: Sequence[CodecSegment[QuantizedPlan]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        counted = [p.columns.start for p in self.parts if p.plan.dithered]
        self._dither = Dither(setup, counted) if counted else None

    def _prepare(self, part: Part[QuantizedPlan], gradient: torch.dtype) -> None:
        f = part.feedback
        self._ops.prepare_blocks(
            part.plan.layout, gradient, f.residual_dtype, f.old_share, dithered=part.plan.dithered
        )

    def _quantize(
        self, part: Part[QuantizedPlan], grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        layout, average = part.plan.layout, part.feedback.old_share
        seeds = None
        if self._dither is not None and part.plan.dithered:
            seeds = self._dither.seeds(part.columns.start, self.steps)
        self._ops.quantize(grad, residual, message, layout=layout, average=average, dither=seeds)

    def _dequantize(
        self, plan: QuantizedPlan, message: Tensor, out: Tensor, divisor: int, *, add: bool = False
    ) -> None:
        self._ops.dequantize(message, out, layout=plan.layout, divisor=divisor, add=add)

    def decode_sums(self, received: Tensor, rows: Tensor) -> None:
        """See :meth:`Codec.decode_sums`: sums beyond float16's range are infinite, as the dtype's
        own are."""
        for part in self.parts:
            words, elements = received[..., part.words], rows[:, part.columns]
            self._dequantize(part.plan, words, elements, divisor=1)

    def decode_rows(self, received: Tensor, rows: Tensor, *, add: bool = False) -> None:
        super().decode_rows(received, rows, add=add)
        if rows.dtype == torch.float16 and not add:
            # Within a scale's rounding of the largest number; what is not finite is NaN here.
            largest = torch.finfo(rows.dtype).max
            for part in self.parts:
                rows[:, part.columns].clamp_(-largest, largest)


@cache
def _largest_scale(dtype: torch.dtype, levels: int) -> int:
    """The bits of the largest bfloat16 whose product with ``levels`` is a number of ``dtype``. (A
    NaN's are larger, and scales have no sign.)"""
    largest = torch.tensor(torch.finfo(dtype).max / levels, dtype=torch.float32, device="cpu")
    return int(largest.view(torch.int32)) >> 16


def sample_quantized(plan: QuantizedPlan, s: Sample) -> TimedSteps:
    """Steps that encode and decode ``s.grad``."""
    layout = replace(plan.layout, numel=s.columns)
    message, out = s.empty(ROWS, layout.words), torch.empty_like(s.grad[:1])
    seeds = s.empty(len(s.grad)) if plan.dithered else None

    def encode() -> None:
        dither = seeds_of(s.grad) if plan.by_content else seeds
        s.ops.quantize(s.grad, s.residual, message, layout=layout, average=s.average, dither=dither)

    return (
        encode,
        lambda: s.ops.dequantize(message[None], out, layout=layout, divisor=ROWS),
    )


QUANTIZED = CodecKind(
    name="quantized",
    config=QuantizedConfig,
    parameter_config=QuantizedParametersConfig,
    plan=QuantizedPlan,
    make_plan=plan_quantized,
    codec=QuantizedCodec,
    sample=sample_quantized,
)
