"""The ``sketch`` codec: the index rides in the unit's message, the cells are summed on the way.

With a shared support (:mod:`tagc.codecs.support`) every rank sketches the same groups, so that the
sum has no more keys than one rank's sketch. The owner knows them, and its choice for the next step
rides where otherwise the index would be, before the poison word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.blocks import BlockLayout
from tagc.codec_plans import SketchPlan
from tagc.codecs import delivery, nested, part_of
from tagc.codecs.residual import Residual, opened
from tagc.codecs.stored import Part, StoredColumns
from tagc.codecs.support import Support
from tagc.exchange import Pending, all_reduce_sum, gather_rows, sum_rows
from tagc.ops import COUNTS, KEPT, UNION, UNRESOLVED, Ops
from tagc.packed import PackedLayout
from tagc.plan import UnitPlan
from tagc.quantize import quantization_step
from tagc.threshold import Steering, agree, sampled_threshold
from tagc.workspace import Workspace

# With room for every group nothing is selected away and the threshold only sets the step: the
# median is a scale that neither outliers nor zeros move.
_SCALE_DENSITY = 0.5


@dataclass(frozen=True)
class _Part(Part):
    """One segment and where its part of the messages lies."""

    sketch: SketchPlan
    index: slice
    cells: slice
    shared: _Shared | None

    @property
    def support(self) -> Support | None:
        """What all ranks keep, where they share it."""
        return None if self.shared is None else self.shared.support


@dataclass(frozen=True)
class _Shared:
    """A segment's shared support.

    Attributes:
        place: among the segments that have one.
        union: ``[1, index_words]``, the index that this rank's shard is decoded by.
    """

    place: int
    support: Support
    union: Tensor


class SketchColumns(StoredColumns[_Part]):
    """State and step of the sketched columns of a unit. See :class:`tagc.codecs.Columns`.

    Attributes:
        steering: the segments' thresholds, equal on every rank.
        totals: ``[segments, 3]`` int64 sums over steps on this rank: groups kept for all
            destinations, groups in the union of the own shard, groups unresolved there.
    """

    def __init__(
        self, plan: UnitPlan, ops: Ops, device: torch.device, workspace: Workspace, seed: int
    ) -> None:
        super().__init__()
        W, D = plan.info.world_size, plan.destinations
        self._destinations, self._ops, self._workspace = D, ops, workspace
        self._world_size, self._for_all = W, plan.for_all
        # A choice needs a threshold of its own: the agreed one is about all that ranks send.
        self._choosing: Steering | None = None
        wanted: list[float] = []
        words, self._cells = 0, {torch.int32: 0, torch.float32: 0}
        for segment in plan.of(SketchPlan):
            sketch = segment.codec
            assert isinstance(sketch, SketchPlan)
            layout, dtype, stored = sketch.layout, sketch.symbol.dtype, sketch.feedback
            residual = Residual.new(D, segment.columns, stored, ops, device)
            given = delivery.dtype_of(plan.info.dtype, stored)
            ops.prepare(layout, given, stored.working if stored else None)
            cells = slice(self._cells[dtype], self._cells[dtype] + layout.cells)
            index = slice(words, words + layout.index_words)
            shared = None
            if sketch.shared:
                choice = _choice_of(sketch)
                ops.prepare_packed(choice, plan.info.dtype, stored.working if stored else None)
                support = Support(choice, sketch.target, D, device)
                union = torch.zeros(1, layout.index_words, dtype=torch.int32, device=device)
                shared = _Shared(len(wanted), support, union)
                wanted.append(support.wanted)
            kept = delivery.new_kept(segment, device)
            self._parts.append(_Part(segment, residual, kept, sketch, index, cells, shared))
            words, self._cells[dtype] = index.stop, cells.stop
        self.words = words
        n = len(self._parts)
        self._seed = torch.tensor([seed], dtype=torch.int32, device=device)
        self._steps = torch.ones(n, D, device=device)
        target = [W * self._scale_density(part) * part.sketch.layout.groups for part in self._parts]
        boost = [part.sketch.max_boost for part in self._parts]
        self.steering = Steering(
            torch.tensor(target, device=device), torch.tensor(boost, device=device), D
        )
        self._counts = torch.zeros(n, D, COUNTS, dtype=torch.int32, device=device)
        self._summed = torch.zeros_like(self._counts)
        self._stats = torch.zeros(n, 2, dtype=torch.int32, device=device)
        self._chosen = torch.zeros(len(wanted), D, COUNTS, dtype=torch.int32, device=device)
        if wanted:
            target = torch.tensor(wanted, device=device)
            self._choosing = Steering(target, torch.ones_like(target), D)
        self._counting: Pending | None = None
        self._sums: list[Pending] = []
        self._takes_estimates = True
        self.totals = torch.zeros(n, 3, dtype=torch.int64, device=device)
        self.wire_bytes = 0

    @staticmethod
    def _scale_density(part: _Part) -> float:
        everything = part.sketch.capacity >= part.sketch.layout.groups
        return min(part.sketch.target, _SCALE_DENSITY) if everything else part.sketch.target

    @property
    def steerings(self) -> tuple[Steering, ...]:
        """What thresholds follow."""
        return (self.steering,) if self._choosing is None else (self.steering, self._choosing)

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """See :meth:`tagc.codecs.Columns.encode`."""
        if not self._parts:
            return
        # Where all ranks decode the same shard, one of them takes what is left of it.
        self._takes_estimates = not self._for_all or group.rank() == 0
        self._update_thresholds(grad, group)
        self._seed.add_(1)
        threshold = self.steering.threshold
        for i, part in enumerate(self._parts):
            sketch = part.sketch
            dtype = sketch.symbol.dtype
            step = quantization_step(threshold[i], sketch.symbol, sketch.levels)
            self._steps[i] = step * self.steering.boost[i]
            columns = grad[:, part.segment.start : part.segment.stop]
            with opened(part.residual) as residual:
                self._ops.encode(
                    delivery.fresh(columns, residual, sketch.feedback),
                    residual,
                    threshold[i],
                    self._steps[i],
                    self._seed,
                    message[:, part.index],
                    self._cells_send(dtype)[:, part.cells],
                    self._counts[i],
                    layout=sketch.layout,
                    levels=sketch.levels,
                    capacity=sketch.capacity,
                    support=part.support and part.support.current,
                )
            if part.shared is not None:
                self._choose(part, part.shared, message[:, part.index], group.rank())

    def _choose(self, part: _Part, shared: _Shared, index: Tensor, mine: int) -> None:
        """Write this rank's choice over what the operator wrote, which the owner knows."""
        assert part.residual is not None
        assert self._choosing is not None
        own = slice(mine, mine + 1)
        shared.support.choose(
            self._ops,
            part.residual.read(own),
            self._choosing.threshold[shared.place, own],
            index[:, : part.sketch.layout.words],
            self._chosen[shared.place],
        )

    def start(self, group: dist.ProcessGroup) -> None:
        """Start summing the cells, and the counts for the next step."""
        if not self._parts:
            return
        for dtype, numel in self._cells.items():
            if numel:
                self._sums.append(self._sum(dtype, numel, group))
        self._summed.copy_(self._counts)
        self._counting = all_reduce_sum(self._summed, group)
        self.wire_bytes += sum(p.wire_bytes for p in (self._counting, *self._sums))

    def _sum(self, dtype: torch.dtype, numel: int, group: dist.ProcessGroup) -> Pending:
        send = self._cells_send(dtype)
        if self._for_all:
            return all_reduce_sum(send, group)
        received = self._workspace.take("cells_recv", send.shape, dtype)
        return sum_rows(self._cells_sum(dtype), send, received, group)

    def wait(self) -> None:
        """Until the cells are here."""
        for pending in self._sums:
            pending.wait()
        self._sums.clear()

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """See :meth:`tagc.codecs.Columns.decode`."""
        for i, part in enumerate(self._parts):
            residual = part.residual if self._takes_estimates else None
            index, shared = received[:, part.index], part.shared
            if shared is not None:
                choices, poison = index[:, :-1], index[:, -1]
                shared.union[0, :-1] = shared.support.current[owner]
                shared.union[0, -1] = poison.amax()
                shared.support.receive(self._ops, choices)
            columns = out[part.segment.start : part.segment.stop]
            sent = delivery.received(columns, part.kept)
            with opened(residual, slice(owner, owner + 1)) as owed:
                self._ops.decode(
                    index if shared is None else shared.union,
                    self._cells_sum(part.sketch.symbol.dtype)[part.cells],
                    self._steps[i, owner : owner + 1],
                    self._seed,
                    sent,
                    None if owed is None else owed[0],
                    self._stats[i],
                    layout=part.sketch.layout,
                    divisor=divisor,
                )
            delivery.hand_out(sent, part.kept, part.sketch.feedback, columns)
        if self._parts:
            self.totals[:, 0] += self._counts[..., KEPT].sum(1)
            self.totals[:, 1] += self._stats[:, UNION]
            self.totals[:, 2] += self._stats[:, UNRESOLVED]

    def state(self) -> dict[str, Tensor]:
        """See :meth:`tagc.codecs.Columns.state`."""
        if not self._parts:
            return {}
        if self._counting is not None:
            self._counting.wait()
        state = {
            "started": torch.tensor(self._counting is not None),
            "wire_bytes": torch.tensor(self.wire_bytes),
            "seed": self._seed,
            "summed": self._summed,
            "totals": self.totals,
            **nested("steering", self.steering.state()),
        }
        if self._choosing is not None:
            state["chosen"] = self._chosen
            state |= nested("choosing", self._choosing.state())
        for place, support in self._supports():
            state |= nested(f"support.{place}", support.state())
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.check_state`."""
        if self._parts:
            if not 0 <= int(state["wire_bytes"]) < 2**59:
                raise ValueError(f"wire_bytes is {int(state['wire_bytes'])}")
            self.steering.check_state(part_of("steering", state))
        if self._choosing is not None:
            self._choosing.check_state(part_of("choosing", state))
        for place, support in self._supports():
            support.check_state(part_of(f"support.{place}", state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`tagc.codecs.Columns.load_state`."""
        if not self._parts:
            return
        if self._counting is not None:
            self._counting.wait()
        self._counting = Pending((), 0) if state["started"] else None
        self.wire_bytes = int(state["wire_bytes"])
        self._seed.copy_(state["seed"])
        self._summed.copy_(state["summed"])
        self.totals.copy_(state["totals"])
        self.steering.load_state(part_of("steering", state))
        if self._choosing is not None:
            self._chosen.copy_(state["chosen"])
            self._choosing.load_state(part_of("choosing", state))
        for place, support in self._supports():
            support.load_state(part_of(f"support.{place}", state))

    def _supports(self) -> list[tuple[int, Support]]:
        return [(p.shared.place, p.shared.support) for p in self._parts if p.shared is not None]

    def _update_thresholds(self, grad: Tensor, group: dist.ProcessGroup) -> None:
        if self._counting is None:
            # The only exchange that a unit ever waits for before it sends.
            sampled = torch.stack(
                [
                    sampled_threshold(
                        grad[:, part.segment.start : part.segment.stop],
                        part.sketch.symbol.lanes,
                        self._scale_density(part),
                    )
                    * delivery.scale(part.sketch.feedback)
                    for part in self._parts
                ]
            )
            gathered = gather_rows(sampled, group)
            self.wire_bytes += (self._world_size - 1) * sampled.numel() * sampled.element_size()
            self.steering.threshold.copy_(agree(gathered))
            if self._choosing is not None:
                places = [i for i, part in enumerate(self._parts) if part.shared]
                for place, i in enumerate(places):
                    self._choosing.threshold[place] = self.steering.threshold[i]
        else:
            self._counting.wait()
            self.steering.update(self._summed)
            if self._choosing is not None:
                self._choosing.update(self._chosen)

    def _cells_send(self, dtype: torch.dtype) -> Tensor:
        return self._workspace.take("cells_send", (self._destinations, self._cells[dtype]), dtype)

    def _cells_sum(self, dtype: torch.dtype) -> Tensor:
        if self._for_all:  # summed in place
            return self._cells_send(dtype)[0]
        return self._workspace.take("cells_sum", (self._cells[dtype],), dtype)


def _choice_of(sketch: SketchPlan) -> PackedLayout:
    """How an owner chooses: groups are symbols, and a bitmap of them travels, without values."""
    layout = sketch.layout
    return PackedLayout(
        numel=layout.numel,
        group=layout.symbol.lanes,
        capacity=sketch.capacity,
        low_bits=0,
        values=BlockLayout(numel=sketch.capacity * layout.symbol.lanes, bits=8),
    )
