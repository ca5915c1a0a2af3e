"""What compression did so far, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tagc.codec_plans import PackedPlan, SketchPlan
from tagc.reducer import UnitReducer


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Counts of one rank since ``tagc.wrap``.

    Bytes are what this rank handed to collectives for other ranks: gradients in the
    reduce-scatter, unless the name says otherwise. Densities are fractions of the elements of
    sparse codecs, averaged over the steps after the warm-up; NaN before.

    Attributes:
        steps: reductions per unit (the largest).
        wire_bytes: bytes sent, all parameters.
        compressed_wire_bytes: bytes sent for compressed parameters, index and counts included.
        dense_bytes: what a dense reduce-scatter would have sent, all parameters.
        compressed_dense_bytes: what it would have sent for the compressed parameters.
        parameter_wire_bytes: bytes sent in all-gathers; 0 if the policy leaves them to FSDP.
        parameter_dense_bytes: what FSDP's own all-gathers would have sent, likewise.
        parameter_error: Euclidean norm of what quantization changes in this rank's parameters,
            relative to theirs, now.
        replica_wire_bytes: bytes sent to other replicas.
        replica_dense_bytes: what an all-reduce of the shards would have sent.
        density_target: density that the policy asks for, averaged over elements.
        density: fraction that this rank kept.
        union_density: fraction of this rank's own shard that any rank kept (sketches only).
        unresolved: groups of this rank's shard that could not be decoded (they went to the
            residual); 0 is normal.
        residual_norm: Euclidean norm of this rank's residual now.
    """

    steps: int
    wire_bytes: int
    compressed_wire_bytes: int
    dense_bytes: int
    compressed_dense_bytes: int
    parameter_wire_bytes: int
    parameter_dense_bytes: int
    parameter_error: float
    replica_wire_bytes: int
    replica_dense_bytes: int
    density_target: float
    density: float
    union_density: float
    unresolved: int
    residual_norm: float

    @property
    def wire_bytes_per_step(self) -> float:
        """Bytes sent in a step."""
        return self.wire_bytes / max(1, self.steps)

    @property
    def dense_bytes_per_step(self) -> float:
        """Bytes that dense sends in a step."""
        return self.dense_bytes / max(1, self.steps)

    @property
    def compressed_wire_bytes_per_step(self) -> float:
        """Bytes sent in a step for compressed parameters."""
        return self.compressed_wire_bytes / max(1, self.steps)

    @property
    def compressed_dense_bytes_per_step(self) -> float:
        """Bytes that dense sends in a step for the compressed parameters."""
        return self.compressed_dense_bytes / max(1, self.steps)


@dataclass
class _Selected:
    """Elements of sparse codecs, over the steps."""

    planned: float = 0
    target: float = 0
    selectable: float = 0
    kept: float = 0
    sketched: float = 0
    union: float = 0
    unresolved: int = 0

    def add(self, reducer: UnitReducer) -> None:
        steps, ranks = reducer.compressed_steps, reducer.plan.destinations
        sketches = zip(reducer.plan.of(SketchPlan), reducer.sketch.totals.tolist(), strict=True)
        for segment, (kept, union, unresolved) in sketches:
            assert isinstance(segment.codec, SketchPlan)
            lanes, groups = segment.codec.symbol.lanes, segment.codec.layout.groups
            self._add(segment.codec.target, groups * lanes, kept * lanes, steps, ranks)
            self.sketched += groups * lanes * steps
            self.union += union * lanes
            self.unresolved += unresolved
        for segment, kept in zip(
            reducer.plan.of(PackedPlan), reducer.packed.totals.tolist(), strict=True
        ):
            assert isinstance(segment.codec, PackedPlan)
            layout = segment.codec.layout
            elements = layout.groups * layout.group
            self._add(segment.codec.target, elements, kept * layout.group, steps, ranks)

    def _add(self, target: float, elements: int, kept: float, steps: int, ranks: int) -> None:
        self.planned += elements
        self.target += target * elements
        self.selectable += elements * steps * ranks
        self.kept += kept


def collect(
    reducers: Sequence[UnitReducer],
    *,
    replicas: Sequence[UnitReducer] = (),
    parameter_bytes: tuple[int, int] = (0, 0),
    parameter_error: float = 0.0,
) -> Metrics:
    """Read the counters of all units. Waits for the device.

    Args:
        parameter_bytes: sent, and what FSDP's own all-gathers would have sent.
        parameter_error: see :class:`Metrics`.
    """
    selected = _Selected()
    for reducer in (*reducers, *replicas):
        selected.add(reducer)
    norms = [
        torch.linalg.vector_norm(residual.float(), dtype=torch.float64).item()
        for reducer in (*reducers, *replicas)
        for residual in reducer.residuals.values()
    ]
    nothing = math.nan if selected.planned else 1.0
    return Metrics(
        steps=max((r.steps for r in reducers), default=0),
        wire_bytes=sum(r.wire_bytes for r in reducers),
        compressed_wire_bytes=sum(r.compressed_wire_bytes for r in reducers),
        dense_bytes=_dense_bytes(reducers),
        compressed_dense_bytes=_dense_bytes(reducers, compressed=True),
        parameter_wire_bytes=parameter_bytes[0],
        parameter_dense_bytes=parameter_bytes[1],
        parameter_error=parameter_error,
        replica_wire_bytes=sum(r.wire_bytes for r in replicas),
        replica_dense_bytes=_dense_bytes(replicas),
        density_target=selected.target / selected.planned if selected.planned else 1.0,
        density=selected.kept / selected.selectable if selected.selectable else nothing,
        union_density=selected.union / selected.sketched if selected.sketched else nothing,
        unresolved=selected.unresolved,
        residual_norm=math.hypot(*norms),
    )


def _dense_bytes(reducers: Sequence[UnitReducer], *, compressed: bool = False) -> int:
    total = 0
    for reducer in reducers:
        plan = reducer.plan
        columns = sum(plan.dense_columns(s.params) for s in plan.compressed)
        columns = columns if compressed else plan.buffer_columns
        total += int(plan.dense_bytes(columns)) * reducer.steps
    return total
