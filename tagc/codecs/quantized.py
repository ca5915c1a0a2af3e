"""The codecs that send every element in a few bits.

``quantized`` has a scale per block, and with the feedback kind ``average`` is LoCo (arXiv
2407.04480) in DeepSpeed's form; ``matrix`` has scales of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codec_plans import CodecPlan, FeedbackPlan, MatrixPlan, QuantizedPlan
from tagc.codecs import delivery
from tagc.codecs.residual import Residual, opened
from tagc.codecs.stored import Part, StoredColumns
from tagc.ops import Ops
from tagc.plan import UnitPlan


@dataclass(frozen=True)
class _Part(Part):
    slot: slice


class _ElementColumns(StoredColumns[_Part]):
    """State and step of columns of which every element is sent. See :class:`tagc.codecs.Columns`.

    Attributes:
        steps: encodings so far, which ``reset_steps`` counts.
    """

    kind: type[CodecPlan]

    def __init__(self, plan: UnitPlan, ops: Ops, device: torch.device) -> None:
        super().__init__()
        self.words = 0
        self.wire_bytes = 0
        self._ops = ops
        self.steps = 0
        for segment in plan.of(self.kind):
            stored = segment.codec.feedback
            residual = Residual.new(plan.destinations, segment.columns, stored, ops, device)
            slot = slice(self.words, self.words + segment.codec.words)
            kept = delivery.new_kept(segment, device)
            self._parts.append(_Part(segment, residual, kept, slot))
            self.words = slot.stop
            self._prepare(segment.codec, delivery.dtype_of(plan.info.dtype, stored), stored)

    def _prepare(
        self, codec: CodecPlan, gradient: torch.dtype, feedback: FeedbackPlan | None
    ) -> None:
        """Compile the operators."""
        raise NotImplementedError

    def _quantize(
        self, codec: CodecPlan, grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        """``[D, columns]`` each to ``[D, words]``."""
        raise NotImplementedError

    def _dequantize(self, codec: CodecPlan, message: Tensor, out: Tensor, divisor: int) -> None:
        """``[W, words]`` to ``[columns]``."""
        raise NotImplementedError

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """See :meth:`tagc.codecs.Columns.encode`."""
        for part in self._parts:
            feedback = part.segment.codec.feedback
            if part.residual is not None and feedback is not None:
                every = feedback.reset_steps
                if every and self.steps and self.steps % every == 0:
                    part.residual.zero_()
            columns = grad[:, part.segment.start : part.segment.stop]
            with opened(part.residual) as residual:
                fresh = delivery.fresh(columns, residual, feedback)
                self._quantize(part.segment.codec, fresh, residual, message[:, part.slot])
        self.steps += 1

    def start(self, group: dist.ProcessGroup) -> None:
        """Nothing but the message."""

    def wait(self) -> None:
        """Nothing but the message."""

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """See :meth:`tagc.codecs.Columns.decode`."""
        for part in self._parts:
            columns = out[part.segment.start : part.segment.stop]
            sent = delivery.received(columns, part.kept)
            self._dequantize(part.segment.codec, received[:, part.slot], sent, divisor)
            delivery.hand_out(sent, part.kept, part.segment.codec.feedback, columns)

    def state(self) -> dict[str, Tensor]:
        """See :meth:`tagc.codecs.Columns.state`."""
        return {"steps": torch.tensor(self.steps)} if self._parts else {}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.check_state`."""
        if self._parts and not 0 <= int(state["steps"]) < 2**59:
            raise ValueError(f"steps is {int(state['steps'])}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.load_state`."""
        if self._parts:
            self.steps = int(state["steps"])


class QuantizedColumns(_ElementColumns):
    """The columns of codec ``quantized``."""

    kind = QuantizedPlan

    def _prepare(
        self, codec: CodecPlan, gradient: torch.dtype, feedback: FeedbackPlan | None
    ) -> None:
        assert isinstance(codec, QuantizedPlan)
        stored = feedback.working if feedback else None
        self._ops.prepare_blocks(codec.layout, gradient, stored, _average(feedback))

    def _quantize(
        self, codec: CodecPlan, grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        assert isinstance(codec, QuantizedPlan)
        self._ops.quantize(
            grad, residual, message, layout=codec.layout, average=_average(codec.feedback)
        )

    def _dequantize(self, codec: CodecPlan, message: Tensor, out: Tensor, divisor: int) -> None:
        assert isinstance(codec, QuantizedPlan)
        self._ops.dequantize(message[None], out[None], layout=codec.layout, divisor=divisor)


class MatrixColumns(_ElementColumns):
    """The columns of codec ``matrix``: the messages of the matrices one after the other."""

    kind = MatrixPlan

    def _prepare(
        self, codec: CodecPlan, gradient: torch.dtype, feedback: FeedbackPlan | None
    ) -> None:
        assert isinstance(codec, MatrixPlan)
        stored = feedback.working if feedback else None
        for layout in codec.layouts:
            self._ops.prepare_matrix(layout, gradient, stored, _average(feedback))

    def _quantize(
        self, codec: CodecPlan, grad: Tensor, residual: Tensor | None, message: Tensor
    ) -> None:
        assert isinstance(codec, MatrixPlan)
        for layout, columns, words in codec.pieces:
            self._ops.quantize_matrix(
                grad[:, columns],
                None if residual is None else residual[:, columns],
                message[:, words],
                layout=layout,
                average=_average(codec.feedback),
            )

    def _dequantize(self, codec: CodecPlan, message: Tensor, out: Tensor, divisor: int) -> None:
        assert isinstance(codec, MatrixPlan)
        for layout, columns, words in codec.pieces:
            self._ops.dequantize_matrix(
                message[:, words], out[columns], layout=layout, divisor=divisor
            )


def _average(feedback: FeedbackPlan | None) -> float:
    return feedback.average if feedback else 0.0
