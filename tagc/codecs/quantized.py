"""The ``quantized`` codec: every element in a few bits, with a scale per block.

With the feedback kind ``average`` this is LoCo (arXiv 2407.04480), in DeepSpeed's form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codec_plans import QuantizedPlan
from tagc.codecs import momentum
from tagc.ops import Ops
from tagc.plan import Segment, UnitPlan


@dataclass(frozen=True)
class _Part:
    segment: Segment
    plan: QuantizedPlan
    slot: slice
    residual: Tensor | None
    momentum: Tensor | None  # see tagc.codecs.momentum


class QuantizedColumns:
    """State and step of the quantized columns of a unit. See :class:`tagc.codecs.Columns`.

    Attributes:
        steps: encodings so far, which ``reset_steps`` counts.
    """

    def __init__(self, plan: UnitPlan, ops: Ops, device: torch.device) -> None:
        self.words = 0
        self.wire_bytes = 0
        self._ops = ops
        self.steps = 0
        self._parts: list[_Part] = []
        for segment in plan.of(QuantizedPlan):
            codec = segment.codec
            assert isinstance(codec, QuantizedPlan)
            stored = codec.feedback
            residual = stored and torch.zeros(
                plan.destinations, segment.columns, dtype=stored.dtype, device=device
            )
            slot = slice(self.words, self.words + codec.words)
            average = momentum.new_average(segment, device)
            self._parts.append(_Part(segment, codec, slot, residual, average))
            self.words = slot.stop
            ops.prepare_blocks(
                codec.layout,
                momentum.dtype_of(plan.info.dtype, stored),
                stored.dtype if stored else None,
                stored.average if stored else 0.0,
            )

    @property
    def parts(self) -> list[_Part]:
        """The segments."""
        return self._parts

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residual ``[D, columns]`` by first column of the segment in the unit."""
        return {p.segment.start: p.residual for p in self._parts if p.residual is not None}

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """See :meth:`tagc.codecs.Columns.encode`."""
        for part in self._parts:
            feedback = part.plan.feedback
            if part.residual is not None and feedback is not None:
                every = feedback.reset_steps
                if every and self.steps and self.steps % every == 0:
                    part.residual.zero_()
            columns = grad[:, part.segment.start : part.segment.stop]
            self._ops.quantize(
                momentum.fresh(columns, part.residual, feedback),
                part.residual,
                message[:, part.slot],
                layout=part.plan.layout,
                average=feedback.average if feedback else 0.0,
            )
        self.steps += 1

    def start(self, group: dist.ProcessGroup) -> None:
        """Nothing but the message."""

    def wait(self) -> None:
        """Nothing but the message."""

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """See :meth:`tagc.codecs.Columns.decode`."""
        for part in self._parts:
            columns = out[part.segment.start : part.segment.stop]
            sent = momentum.received(columns, part.momentum)
            self._ops.dequantize(
                received[None, :, part.slot],
                sent[None],
                layout=part.plan.layout,
                divisor=divisor,
            )
            momentum.hand_out(sent, part.momentum, part.plan.feedback, columns)

    def warm_up(self, out: Tensor) -> None:
        """See :meth:`tagc.codecs.Columns.warm_up`."""
        for part in self._parts:
            columns = out[part.segment.start : part.segment.stop]
            momentum.warm_up(part.momentum, part.segment.codec.feedback, columns)

    def state(self) -> dict[str, Tensor]:
        """See :meth:`tagc.codecs.Columns.state`."""
        if not self._parts:
            return {}
        return {"steps": torch.tensor(self.steps), **momentum.state(self._parts)}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.check_state`."""
        if self._parts and not 0 <= int(state["steps"]) < 2**59:
            raise ValueError(f"steps is {int(state['steps'])}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.load_state`."""
        if self._parts:
            self.steps = int(state["steps"])
            momentum.load_state(self._parts, state)
