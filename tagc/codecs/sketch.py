"""The ``sketch`` codec: the index rides in the unit's message, the cells are summed on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codec_plans import SketchPlan
from tagc.exchange import Pending, all_reduce_sum, gather_rows, sum_rows
from tagc.ops import COUNTS, KEPT, UNION, UNRESOLVED, Ops
from tagc.plan import Segment, UnitPlan
from tagc.quantize import quantization_step
from tagc.threshold import Steering, agree, sampled_threshold
from tagc.workspace import Workspace

# With room for every group nothing is selected away and the threshold only sets the step: the
# median is a scale that neither outliers nor zeros move.
_SCALE_DENSITY = 0.5


@dataclass(frozen=True)
class _Part:
    """One segment and where its part of the messages lies."""

    segment: Segment
    sketch: SketchPlan
    index: slice
    cells: slice
    residual: Tensor | None


class SketchColumns:
    """State and step of the sketched columns of a unit. See :class:`tagc.codecs.Columns`.

    Attributes:
        steering: the segments' thresholds, equal on every rank.
        totals: ``[segments, 3]`` int64 sums over steps on this rank: groups kept for all
            destinations, groups in the union of the own shard, groups unresolved there.
    """

    def __init__(
        self, plan: UnitPlan, ops: Ops, device: torch.device, workspace: Workspace, seed: int
    ) -> None:
        W, D = plan.info.world_size, plan.destinations
        self._destinations, self._ops, self._workspace = D, ops, workspace
        self._world_size = W
        self._parts: list[_Part] = []
        words, self._cells = 0, {torch.int32: 0, torch.float32: 0}
        for segment in plan.of(SketchPlan):
            sketch = segment.codec
            assert isinstance(sketch, SketchPlan)
            layout, dtype, stored = sketch.layout, sketch.symbol.dtype, sketch.feedback
            residual = stored and torch.zeros(D, segment.columns, dtype=stored.dtype, device=device)
            ops.prepare(layout, plan.info.dtype, stored.dtype if stored else None)
            cells = slice(self._cells[dtype], self._cells[dtype] + layout.cells)
            index = slice(words, words + layout.index_words)
            self._parts.append(_Part(segment, sketch, index, cells, residual))
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
    def residuals(self) -> dict[int, Tensor]:
        """Residual ``[D, columns]`` by first column of the segment in the unit."""
        return {p.segment.start: p.residual for p in self._parts if p.residual is not None}

    def encode(self, grad: Tensor, message: Tensor, group: dist.ProcessGroup) -> None:
        """See :meth:`tagc.codecs.Columns.encode`."""
        if not self._parts:
            return
        # Where all ranks decode the same shard, one of them takes what is left of it.
        self._takes_estimates = self._destinations > 1 or group.rank() == 0
        self._update_thresholds(grad, group)
        self._seed.add_(1)
        threshold = self.steering.threshold
        for i, part in enumerate(self._parts):
            sketch = part.sketch
            dtype = sketch.symbol.dtype
            step = quantization_step(threshold[i], sketch.symbol, sketch.levels)
            self._steps[i] = step * self.steering.boost[i]
            self._ops.encode(
                grad[:, part.segment.start : part.segment.stop],
                part.residual,
                threshold[i],
                self._steps[i],
                self._seed,
                message[:, part.index],
                self._cells_send(dtype)[:, part.cells],
                self._counts[i],
                layout=sketch.layout,
                levels=sketch.levels,
                capacity=sketch.capacity,
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
        if self._destinations == 1:
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
            self._ops.decode(
                received[:, part.index],
                self._cells_sum(part.sketch.symbol.dtype)[part.cells],
                self._steps[i, owner : owner + 1],
                self._seed,
                out[part.segment.start : part.segment.stop],
                None if residual is None else residual[owner],
                self._stats[i],
                layout=part.sketch.layout,
                divisor=divisor,
            )
        if self._parts:
            self.totals[:, 0] += self._counts[..., KEPT].sum(1)
            self.totals[:, 1] += self._stats[:, UNION]
            self.totals[:, 2] += self._stats[:, UNRESOLVED]

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
                    for part in self._parts
                ]
            )
            gathered = gather_rows(sampled, group)
            self.wire_bytes += (self._world_size - 1) * sampled.numel() * sampled.element_size()
            self.steering.threshold.copy_(agree(gathered))
        else:
            self._counting.wait()
            self.steering.update(self._summed)

    def _cells_send(self, dtype: torch.dtype) -> Tensor:
        return self._workspace.take("cells_send", (self._destinations, self._cells[dtype]), dtype)

    def _cells_sum(self, dtype: torch.dtype) -> Tensor:
        if self._destinations == 1:  # summed in place
            return self._cells_send(dtype)[0]
        return self._workspace.take("cells_sum", (self._cells[dtype],), dtype)
