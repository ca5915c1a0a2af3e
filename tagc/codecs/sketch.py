"""The ``sketch`` codec: all sketched segments of one unit, in one index and one cells message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.exchange import Pending, all_reduce_sum, all_to_all, gather_rows, sum_rows
from tagc.ops import COUNTS, KEPT, UNION, UNRESOLVED, Ops
from tagc.plan import Segment, SketchPlan, UnitPlan
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
    """State and step of the sketched columns of a unit.

    Attributes:
        steering: the segments' thresholds, equal on every rank.
        totals: ``[segments, 3]`` int64 sums over steps on this rank: groups kept for all
            destinations, groups in the union of the own shard, groups unresolved there.
        wire_bytes: bytes sent to other ranks so far.
    """

    def __init__(
        self, plan: UnitPlan, ops: Ops, device: torch.device, workspace: Workspace, seed: int
    ) -> None:
        W = plan.info.world_size
        self._world_size, self._ops, self._workspace = W, ops, workspace
        self._parts: list[_Part] = []
        words, self._cells = 0, {torch.int32: 0, torch.float32: 0}
        for segment in plan.sketched:
            sketch = segment.sketch
            assert sketch is not None
            layout, dtype = sketch.layout, sketch.symbol.dtype
            residual = (
                None
                if sketch.residual_dtype is None
                else torch.zeros(W, segment.columns, dtype=sketch.residual_dtype, device=device)
            )
            cells = slice(self._cells[dtype], self._cells[dtype] + layout.cells)
            index = slice(words, words + layout.index_words)
            self._parts.append(_Part(segment, sketch, index, cells, residual))
            words, self._cells[dtype] = index.stop, cells.stop
        self._words = words
        n = len(self._parts)
        self._seed = torch.tensor([seed], dtype=torch.int32, device=device)
        self._steps = torch.ones(n, W, device=device)
        target = [W * self._scale_density(part) * part.sketch.layout.groups for part in self._parts]
        boost = [part.sketch.max_boost for part in self._parts]
        self.steering = Steering(
            torch.tensor(target, device=device), torch.tensor(boost, device=device), W
        )
        self._counts = torch.zeros(n, W, COUNTS, dtype=torch.int32, device=device)
        self._summed = torch.zeros_like(self._counts)
        self._stats = torch.zeros(n, 2, dtype=torch.int32, device=device)
        self._counting: Pending | None = None
        self._index: Pending | None = None
        self._sums: list[tuple[torch.dtype, Pending]] = []
        self.totals = torch.zeros(n, 3, dtype=torch.int64, device=device)
        self.wire_bytes = 0

    @staticmethod
    def _scale_density(part: _Part) -> float:
        everything = part.sketch.capacity >= part.sketch.layout.groups
        return min(part.sketch.density, _SCALE_DENSITY) if everything else part.sketch.density

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residual ``[W, columns]`` by position of the segment among the sketched ones."""
        return {i: part.residual for i, part in enumerate(self._parts) if part.residual is not None}

    def encode(self, grad: Tensor, group: dist.ProcessGroup) -> None:
        """Sketch the columns of ``grad`` ``[W, S]`` into the send buffers."""
        if not self._parts:
            return
        self._update_thresholds(grad, group)
        self._seed.add_(1)
        threshold = self.steering.threshold
        index = self._buffer("index_send", self._words, torch.int32)
        for i, part in enumerate(self._parts):
            sketch = part.sketch
            dtype = sketch.symbol.dtype
            step = quantization_step(threshold[i], sketch.symbol, sketch.levels)
            self._steps[i] = step * self.steering.boost[i]
            cells = self._buffer("cells_send", self._cells[dtype], dtype)
            self._ops.encode(
                grad[:, part.segment.start : part.segment.stop],
                part.residual,
                threshold[i],
                self._steps[i],
                self._seed,
                index[:, part.index],
                cells[:, part.cells],
                self._counts[i],
                layout=sketch.layout,
                levels=sketch.levels,
                capacity=sketch.capacity,
            )

    def start(self, group: dist.ProcessGroup) -> None:
        """Send: index by all-to-all, cells by summing, counts for the next step; all in flight."""
        if not self._parts:
            return
        send = self._buffer("index_send", self._words, torch.int32)
        recv = self._buffer("index_recv", self._words, torch.int32)
        self._index = all_to_all(recv, send, group)
        for dtype, numel in self._cells.items():
            if numel:
                pending = sum_rows(
                    self._workspace.take("cells_sum", (numel,), dtype),
                    self._buffer("cells_send", numel, dtype),
                    self._buffer("cells_recv", numel, dtype),
                    group,
                )
                self._sums.append((dtype, pending))
        self._summed.copy_(self._counts)
        self._counting = all_reduce_sum(self._summed, group)
        self.wire_bytes += sum(
            p.wire_bytes for p in (self._index, self._counting, *(p for _, p in self._sums))
        )

    def wait(self) -> None:
        """Until index and cells are here."""
        if self._index is not None:
            self._index.wait()
            for _, pending in self._sums:
                pending.wait()
            self._index = None
            self._sums.clear()

    def decode(self, out: Tensor, rank: int, divisor: int) -> None:
        """Write this rank's shard of the sketched columns into ``out`` ``[S]``."""
        for i, part in enumerate(self._parts):
            dtype = part.sketch.symbol.dtype
            cells = self._workspace.take("cells_sum", (self._cells[dtype],), dtype)
            self._ops.decode(
                self._buffer("index_recv", self._words, torch.int32)[:, part.index],
                cells[part.cells],
                self._steps[i, rank : rank + 1],
                self._seed,
                out[part.segment.start : part.segment.stop],
                None if part.residual is None else part.residual[rank],
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

    def _buffer(self, name: str, columns: int, dtype: torch.dtype) -> Tensor:
        return self._workspace.take(name, (self._world_size, columns), dtype)
