"""What compression did so far, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tagc.reducer import UnitReducer


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Counts of one rank since ``tagc.wrap``.

    Bytes are gradient bytes that this rank handed to collectives for other ranks. Densities are
    fractions of the compressed elements, averaged over the steps after the warm-up; NaN before.

    Attributes:
        steps: reductions per unit (the largest).
        wire_bytes: bytes sent, all parameters.
        compressed_wire_bytes: bytes sent for compressed parameters, index and counts included.
        dense_bytes: what a dense reduce-scatter would have sent, all parameters.
        compressed_dense_bytes: what it would have sent for the compressed parameters.
        density_target: density that the policy asks for, averaged over elements.
        density: fraction that this rank kept.
        union_density: fraction of this rank's own shard that any rank kept.
        unresolved: groups of this rank's shard that could not be decoded (they went to the
            residual); 0 is normal.
        residual_norm: Euclidean norm of this rank's residual now.
    """

    steps: int
    wire_bytes: int
    compressed_wire_bytes: int
    dense_bytes: int
    compressed_dense_bytes: int
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


def collect(reducers: Sequence[UnitReducer]) -> Metrics:
    """Read the counters of all units. Waits for the device."""
    kept = selectable = union = shard = target = planned = 0.0
    unresolved = compressed_wire = dense = compressed_dense = wire = 0
    norm = 0.0
    for reducer in reducers:
        plan, totals = reducer.plan, reducer.sketch.totals.tolist()
        for segment, (k, u, lost) in zip(plan.sketched, totals, strict=True):
            sketch = segment.sketch
            assert sketch is not None
            lanes, groups = sketch.symbol.lanes, sketch.layout.groups
            ranks = plan.info.world_size
            kept, union, unresolved = kept + k * lanes, union + u * lanes, unresolved + lost
            elements = groups * lanes * reducer.sketch_steps
            shard, selectable = shard + elements, selectable + elements * ranks
            target, planned = target + sketch.density * groups * lanes, planned + groups * lanes
        for residual in reducer.sketch.residuals.values():
            norm += torch.linalg.vector_norm(residual.float(), dtype=torch.float64).item() ** 2
        compressed_columns = sum(s.columns for s in plan.sketched)
        dense += plan.dense_bytes(plan.columns) * reducer.steps
        compressed_dense += plan.dense_bytes(compressed_columns) * reducer.steps
        compressed_wire += reducer.compressed_wire_bytes
        wire += reducer.wire_bytes
    nothing = math.nan if planned else 1.0
    return Metrics(
        steps=max((r.steps for r in reducers), default=0),
        wire_bytes=wire,
        compressed_wire_bytes=compressed_wire,
        dense_bytes=dense,
        compressed_dense_bytes=compressed_dense,
        density_target=target / planned if planned else 1.0,
        density=kept / selectable if selectable else nothing,
        union_density=union / shard if shard else nothing,
        unresolved=unresolved,
        residual_norm=norm**0.5,
    )
