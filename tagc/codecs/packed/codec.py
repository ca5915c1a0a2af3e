"""The ``packed`` codec: the largest groups with their index, one message to each owner.

Thresholds are a rank's own: a message says what is in it, so ranks need not agree, and nothing
but the messages is exchanged.

With a shared support (:mod:`tagc.codecs.selection.support`) the owner's choice for the next step
rides where otherwise the index would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, SelectionCount
from tagc.codecs.exchange import Exchange
from tagc.codecs.packed.plan import PackedPlan
from tagc.codecs.selection.support import Support
from tagc.codecs.selection.threshold import (
    ThresholdController,
    check_counts,
    mean_threshold,
    sampled_threshold,
)
from tagc.codecs.state import nested, part_of
from tagc.ops import COUNTS, KEPT
from tagc.ops.packed import index_of


class PackedCodec(Codec[PackedPlan]):
    """The packed segments of a unit, and their thresholds.

    Attributes:
        supports: what all ranks send, by number of the part, where they share it.
    """

    def __init__(self, segments: Sequence[CodecSegment[PackedPlan]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        D, device = setup.destinations, setup.device
        self.supports: dict[int, Support] = {}
        target = []
        for i, part in enumerate(self.parts):
            plan, feedback = part.plan, part.feedback
            given = feedback.gradient_dtype(setup.dtype)
            self._ops.prepare_packed(plan.layout, given, feedback.residual_dtype)
            wanted = plan.target * plan.layout.groups
            if plan.shared:
                self.supports[i] = Support(plan.layout, plan.target, D, device)
                # A rank then selects in its own shard only.
                wanted = self.supports[i].wanted
            target.append(wanted)
        n = len(self.parts)
        self._counts = torch.zeros(n, D, COUNTS, dtype=torch.int32, device=device)
        self._controller = ThresholdController(target, D, self._ops, device)
        self._started = False
        # [segments] int64, groups selected for all destinations, over the steps.
        self._totals = torch.zeros(n, dtype=torch.int64, device=device)

    @property
    def controllers(self) -> tuple[ThresholdController, ...]:
        """See :attr:`Codec.controllers`."""
        return (self._controller,)

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        """See :meth:`Codec.encode`."""
        self._update_thresholds(grad)
        for i, part in enumerate(self.parts):
            words, support = message[:, part.words], self.supports.get(i)
            threshold, counts = self._controller.threshold[i], self._counts[i]
            with part.feedback.opened(grad[:, part.columns]) as (gradient, residual):
                self._ops.pack(
                    gradient,
                    residual,
                    threshold,
                    None if support is None else support.current,
                    words,
                    counts,
                    layout=part.plan.layout,
                )
        self._totals += self._counts[..., KEPT].sum(1)
        for i, support in self.supports.items():
            part, own = self.parts[i], slice(exchange.row, exchange.row + 1)
            assert part.feedback.residual is not None
            support.choose(
                self._ops,
                part.feedback.residual.read(own),
                self._controller.threshold[i, own],
                index_of(message[:, part.words], part.plan.layout),
                self._counts[i],
            )

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        """See :meth:`Codec.decode`."""
        for i, part in enumerate(self.parts):
            words, layout = received[:, part.words], part.plan.layout
            columns, support = out[part.columns], self.supports.get(i)
            decoded = part.feedback.decode_buffer(columns)
            self._ops.unpack(
                words,
                None if support is None else support.current[exchange.row],
                decoded,
                layout=layout,
                divisor=divisor,
            )
            part.feedback.correct(decoded, columns)
            if support is not None:
                support.receive(self._ops, index_of(words, layout))

    def selection_counts(self) -> list[SelectionCount]:
        """See :meth:`Codec.selection_counts`."""
        return [
            SelectionCount(
                target=part.plan.target,
                elements=part.plan.layout.groups * part.plan.layout.group,
                selected=groups * part.plan.layout.group,
            )
            for part, groups in zip(self.parts, self._totals.tolist(), strict=True)
        ]

    def state(self) -> dict[str, Tensor]:
        """See :meth:`Codec.state`."""
        state = {
            "started": torch.tensor(self._started, dtype=torch.bool, device="cpu"),
            "counts": self._counts,
            "totals": self._totals,
            **nested("controller", self._controller.state()),
        }
        for i, support in self.supports.items():
            state |= nested(f"support.{i}", support.state())
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`Codec.check_state`."""
        check_counts(state["counts"])
        self._controller.check_state(part_of("controller", state))
        for i, support in self.supports.items():
            support.check_state(part_of(f"support.{i}", state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`Codec.load_state`."""
        self._started = bool(state["started"])
        self._counts.copy_(state["counts"])
        self._totals.copy_(state["totals"])
        self._controller.load_state(part_of("controller", state))
        for i, support in self.supports.items():
            support.load_state(part_of(f"support.{i}", state))

    def _update_thresholds(self, grad: Tensor) -> None:
        if self._started:
            self._controller.update(self._counts)
            return
        first = []
        for part in self.parts:
            plan = part.plan
            sampled = sampled_threshold(grad[:, part.columns], plan.layout.group, plan.target)
            first.append(mean_threshold(sampled[None]) * part.feedback.gradient_scale)
        self._controller.start(torch.stack(first))
        self._started = True
