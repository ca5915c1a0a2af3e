"""The ``packed`` codec: the largest groups with their index, one message to each owner.

Thresholds are a rank's own: a message says what is in it, so ranks need not agree, and nothing
but the messages is exchanged.

With a shared support (:mod:`tagc.codecs.support`) the owner's choice for the next step rides where
otherwise the index would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codec_plans import PackedPlan
from tagc.codecs import delivery, nested, part_of
from tagc.codecs.residual import Residual, opened
from tagc.codecs.stored import Part, StoredColumns
from tagc.codecs.support import Support
from tagc.ops import COUNTS, KEPT, Ops
from tagc.packed import HEADER
from tagc.plan import UnitPlan
from tagc.threshold import Steering, agree, sampled_threshold


@dataclass(frozen=True)
class _Part(Part):
    plan: PackedPlan
    slot: slice
    support: Support | None


class PackedColumns(StoredColumns[_Part]):
    """State and step of the packed columns of a unit. See :class:`tagc.codecs.Columns`.

    Attributes:
        totals: ``[segments]`` int64 sum over steps of the groups kept for all destinations.
    """

    def __init__(self, plan: UnitPlan, ops: Ops, device: torch.device) -> None:
        super().__init__()
        D = plan.destinations
        self.words = 0
        self.wire_bytes = 0
        self._ops = ops
        for segment in plan.of(PackedPlan):
            codec = segment.codec
            assert isinstance(codec, PackedPlan)
            stored = codec.feedback
            residual = Residual.new(D, segment.columns, stored, ops, device)
            slot = slice(self.words, self.words + codec.words)
            support = Support(codec.layout, codec.target, D, device) if codec.shared else None
            kept = delivery.new_kept(segment, device)
            self._parts.append(_Part(segment, residual, kept, codec, slot, support))
            self.words = slot.stop
            given = delivery.dtype_of(plan.info.dtype, stored)
            ops.prepare_packed(codec.layout, given, stored.working if stored else None)
        n = len(self._parts)
        self._counts = torch.zeros(n, D, COUNTS, dtype=torch.int32, device=device)
        # With a shared support a rank selects in its own shard only.
        target = [
            part.support.wanted if part.support else part.plan.target * part.plan.layout.groups
            for part in self._parts
        ]
        self._steering = Steering(
            torch.tensor(target, device=device), torch.ones(n, device=device), D
        )
        self._started = False
        self.totals = torch.zeros(n, dtype=torch.int64, device=device)

    @property
    def steerings(self) -> tuple[Steering, ...]:
        """What thresholds follow."""
        return (self._steering,)

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """See :meth:`tagc.codecs.Columns.encode`."""
        if not self._parts:
            return
        self._update_thresholds(grad)
        for i, part in enumerate(self._parts):
            threshold, counts = self._steering.threshold[i], self._counts[i]
            columns = grad[:, part.segment.start : part.segment.stop]
            with opened(part.residual) as residual:
                self._ops.pack(
                    delivery.fresh(columns, residual, part.plan.feedback),
                    residual,
                    threshold,
                    part.support and part.support.current,
                    message[:, part.slot],
                    counts,
                    layout=part.plan.layout,
                )
            self.totals[i] += counts[:, KEPT].sum()
            if part.support is not None:
                assert part.residual is not None
                mine = group.rank()
                index = message[:, part.slot][:, HEADER : HEADER + part.plan.layout.index_words]
                own = slice(mine, mine + 1)
                owed = part.residual.read(own)
                part.support.choose(self._ops, owed, threshold[own], index, counts)

    def start(self, group: dist.ProcessGroup) -> None:
        """Nothing but the message."""

    def wait(self) -> None:
        """Nothing but the message."""

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """See :meth:`tagc.codecs.Columns.decode`."""
        for part in self._parts:
            words, layout = received[:, part.slot], part.plan.layout
            columns = out[part.segment.start : part.segment.stop]
            sent = delivery.received(columns, part.kept)
            self._ops.unpack(
                words,
                None if part.support is None else part.support.current[owner],
                sent,
                layout=layout,
                divisor=divisor,
            )
            delivery.hand_out(sent, part.kept, part.plan.feedback, columns)
            if part.support is not None:
                index = words[:, HEADER : HEADER + layout.index_words]
                part.support.receive(self._ops, index)

    def state(self) -> dict[str, Tensor]:
        """See :meth:`tagc.codecs.Columns.state`."""
        if not self._parts:
            return {}
        state = {
            "started": torch.tensor(self._started),
            "counts": self._counts,
            "totals": self.totals,
            **nested("steering", self._steering.state()),
        }
        for i, support in self._supports():
            state |= nested(f"support.{i}", support.state())
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.check_state`."""
        if self._parts:
            self._steering.check_state(part_of("steering", state))
        for i, support in self._supports():
            support.check_state(part_of(f"support.{i}", state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.load_state`."""
        if not self._parts:
            return
        self._started = bool(state["started"])
        self._counts.copy_(state["counts"])
        self.totals.copy_(state["totals"])
        self._steering.load_state(part_of("steering", state))
        for i, support in self._supports():
            support.load_state(part_of(f"support.{i}", state))

    def _supports(self) -> list[tuple[int, Support]]:
        return [(i, p.support) for i, p in enumerate(self._parts) if p.support is not None]

    def _update_thresholds(self, grad: Tensor) -> None:
        if self._started:
            self._steering.update(self._counts)
            return
        for i, part in enumerate(self._parts):
            columns = grad[:, part.segment.start : part.segment.stop]
            sampled = sampled_threshold(columns, part.plan.layout.group, part.plan.target)
            self._steering.threshold[i] = agree(sampled[None]) * delivery.scale(part.plan.feedback)
        self._started = True
