"""The ``packed`` codec: the largest groups with their index, one message to each owner.

Thresholds are a rank's own: a message says what is in it, so ranks need not agree, and nothing
but the messages is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, SelectionCount
from tagc.codecs.exchange import Exchange
from tagc.codecs.packed.plan import PackedPlan
from tagc.codecs.selection.threshold import (
    ThresholdController,
    check_counts,
    mean_threshold,
    sampled_threshold,
)
from tagc.codecs.state import nested, part_of
from tagc.ops import COUNTS, KEPT


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
        """See :meth:`Codec.decode`."""
        for part in self.parts:
            words, columns = received[:, part.words], out[part.columns]
            decoded = part.feedback.decode_buffer(columns)
            self._ops.unpack(words, decoded, layout=part.plan.layout, divisor=divisor)
            part.feedback.correct(decoded, columns)

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
        return {
            "started": torch.tensor(self._started, dtype=torch.bool, device="cpu"),
            "counts": self._counts,
            "totals": self._totals,
            **nested("controller", self._controller.state()),
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`Codec.check_state`."""
        check_counts(state["counts"])
        self._controller.check_state(part_of("controller", state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`Codec.load_state`."""
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
