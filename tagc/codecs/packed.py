"""Codec ``packed``: the largest groups with their index, one message to each owner.

Every rank has its own thresholds. A message describes itself, so ranks need not agree on
thresholds, and exchange nothing but messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, SelectionCount
from tagc.codecs.config import Block, CodecConfig, Density, Steps, unit
from tagc.codecs.exchange import Exchange
from tagc.codecs.kind import CodecKind
from tagc.codecs.plan import PlanRequest
from tagc.codecs.sample import ROWS, Sample, TimedSteps
from tagc.codecs.selection.capacity import capacity_for
from tagc.codecs.selection.plan import SelectingPlan
from tagc.codecs.selection.threshold import (
    ThresholdController,
    check_counts,
    mean_threshold,
    sampled_threshold,
)
from tagc.codecs.state import nested, part_of
from tagc.ops import COUNTS, KEPT
from tagc.ops.packed import PackedLayout, plan_packed


class PackedConfig(CodecConfig):
    """Kept elements with their index, in one message to each owner, which sums them in float32.

    `density` and `warmup_steps` are as for the codec `sketch`. Elements are kept in groups of
    `group`, and quantized to `bits`. Every `block` kept elements share a scale.
    """

    feedback_kinds: ClassVar[tuple[str, ...]] = ("residual", "none")

    kind: Literal["packed"] = "packed"
    """The codec's name."""
    density: Density
    """Share of the elements that a rank keeps, in the largest groups."""
    bits: Annotated[Literal[4, 8], unit("bits per kept element")] = 8
    """Size of a kept element's code."""
    group: Annotated[Literal[1, 2, 4], unit("elements")] = 1
    """How many neighbouring elements are kept or left out together."""
    block: Block = 256
    """How many kept elements share a scale of 16 bits."""
    warmup_steps: Steps = 0
    """How many of the first reductions are dense; a unit uses the longest warm-up of its rules."""


@dataclass(frozen=True, kw_only=True)
class PackedPlan(SelectingPlan):
    """How one segment's kept elements are packed."""

    layout: PackedLayout

    @property
    def name(self) -> str:
        """'packed' with bits and group."""
        group = f"x{self.layout.group}" if self.layout.group > 1 else ""
        return f"packed int{self.layout.values.bits}{group}"

    @property
    def overshoot(self) -> float:
        """See :attr:`CodecPlan.overshoot`: half a step each, and a scale's rounding. (Elements that
        waited in the residual for several steps may exceed more.)"""
        return 1 / self.layout.values.levels + 2**-8

    def scratch_bytes(self, destinations: int, sources: int) -> int:
        """See :meth:`CodecPlan.scratch_bytes`: keys and values."""
        return 4 * max(1, sources) * self.layout.capacity * (1 + self.layout.group)

    @property
    def words(self) -> int:
        """Words of header, index and values."""
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


class PackedCodec(Codec[PackedPlan]):
    """The packed segments of a unit, and their thresholds."""

    def __init__(self, segments: Sequence[CodecSegment[PackedPlan]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        D, device = setup.destinations, setup.device
        for part in self.parts:
            self._ops.prepare_packed(part.plan.layout, setup.dtype, part.feedback.residual_dtype)
        target = [part.plan.target * part.plan.layout.groups for part in self.parts]
        n = len(self.parts)
        self._counts = torch.zeros(n, D, COUNTS, dtype=torch.int32, device=device)
        self._controller = ThresholdController(target, D, self._ops, device)
        self._started = False
        # [segments] int64: groups kept for all destinations, summed over the steps.
        self._totals = torch.zeros(n, dtype=torch.int64, device=device)

    @property
    def controllers(self) -> tuple[ThresholdController, ...]:
        return (self._controller,)

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        self._update_thresholds(grad)
        for i, part in enumerate(self.parts):
            gradient = grad[:, part.columns]
            with part.feedback.opened(gradient) as residual:
                self._ops.pack(
                    gradient,
                    residual,
                    self._controller.threshold[i],
                    message[:, part.words],
                    self._counts[i],
                    layout=part.plan.layout,
                )
        self._totals += self._counts[..., KEPT].sum(1)

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        for part in self.parts:
            words, columns = received[:, part.words], out[part.columns]
            decoded = part.feedback.decode_buffer(columns)
            self._ops.unpack(words, decoded, layout=part.plan.layout, divisor=divisor)
            part.feedback.correct(decoded, columns)

    def selection_counts(self) -> list[SelectionCount]:
        return [
            SelectionCount(
                target=part.plan.target,
                elements=part.plan.layout.groups * part.plan.layout.group,
                selected=groups * part.plan.layout.group,
            )
            for part, groups in zip(self.parts, self._totals.tolist(), strict=True)
        ]

    def state(self) -> dict[str, Tensor]:
        return {
            "started": torch.tensor(self._started, dtype=torch.bool, device="cpu"),
            "counts": self._counts,
            "totals": self._totals,
            **nested("controller", self._controller.state()),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        check_counts(state["counts"])
        self._controller.check_state(part_of("controller", state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._started = bool(state["started"])
        self._counts.copy_(state["counts"])
        self._totals.copy_(state["totals"])
        self._controller.load_state(part_of("controller", state))

    def _update_thresholds(self, grad: Tensor) -> None:
        if self._started:
            self._controller.update(self._counts)
            return
        first = []
        for part in self.parts:
            plan = part.plan
            sampled = sampled_threshold(grad[:, part.columns], plan.layout.group, plan.target)
            first.append(mean_threshold(sampled[None]))
        self._controller.start(torch.stack(first))
        self._started = True


def sample_packed(plan: PackedPlan, s: Sample) -> TimedSteps:
    """Steps that encode and decode ``s.grad``."""
    old = plan.layout
    groups = -(-s.columns // old.group)
    layout = plan_packed(
        s.columns,
        capacity=capacity_for(plan.target, groups),
        group=old.group,
        bits=old.values.bits,
        block=old.values.block,
    )
    message, out = s.empty(ROWS, layout.words), torch.empty_like(s.grad[0])
    counts, threshold = s.empty(ROWS, COUNTS), s.threshold(layout.group, plan.target)

    def encode() -> None:
        s.ops.pack(s.grad, s.residual, threshold, message, counts, layout=layout)

    def decode() -> None:
        s.ops.unpack(message, out, layout=layout, divisor=ROWS)

    return encode, decode


PACKED = CodecKind(
    name="packed",
    config=PackedConfig,
    plan=PackedPlan,
    make_plan=plan_packed_codec,
    codec=PackedCodec,
    sample=sample_packed,
)
