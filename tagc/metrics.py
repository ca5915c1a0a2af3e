"""What compression did so far, as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tagc.comm import UnitReducer


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Counts of one rank since ``tagc.wrap``.

    Bytes are what this rank handed to collectives for other ranks: gradients in the
    reduce-scatter, unless the name says otherwise; where ranks of a host add up first, those for
    other hosts. Densities are fractions of the elements of
    sparse codecs, averaged over the steps after the warm-up; NaN before.

    Attributes:
        steps: reductions per unit (the largest).
        wire_bytes: bytes sent, all parameters.
        compressed_wire_bytes: bytes sent for compressed parameters, index and counts included.
        dense_bytes: what dense reduce-scatters would have sent, all parameters: as many of them, in
            two levels where ours are.
        compressed_dense_bytes: what it would have sent for the compressed parameters.
        inside_wire_bytes: bytes of gradients sent to ranks of the same host, to add up with them; 0
            where every rank sends for itself.
        parameter_wire_bytes: bytes sent in all-gathers; 0 if the policy leaves them to FSDP.
        parameter_dense_bytes: what FSDP's own all-gathers would have sent, likewise.
        parameter_inside_wire_bytes: bytes of parameters sent to ranks of the same host, which hand
            on what came from others.
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
    inside_wire_bytes: int
    parameter_wire_bytes: int
    parameter_dense_bytes: int
    parameter_inside_wire_bytes: int
    parameter_error: float
    replica_wire_bytes: int
    replica_dense_bytes: int
    density_target: float
    density: float
    union_density: float
    unresolved: int
    residual_norm: float


@dataclass
class _Selected:
    """Elements of sparse codecs, over the steps."""

    planned: float = 0
    target: float = 0
    selectable: float = 0
    selected: float = 0
    sketched: float = 0
    union: float = 0
    unresolved: int = 0

    def add(self, reducer: UnitReducer) -> None:
        steps, destinations = reducer.compressed_steps, reducer.plan.destinations
        for count in reducer.selection_counts():
            self.planned += count.elements
            self.target += count.target * count.elements
            self.selectable += count.elements * steps * destinations
            self.selected += count.selected
            self.unresolved += count.unresolved
            if count.union is not None:
                self.sketched += count.elements * steps
                self.union += count.union


def collect(
    reducers: Sequence[UnitReducer],
    *,
    replicas: Sequence[UnitReducer] = (),
    parameter_bytes: tuple[int, int, int] = (0, 0, 0),
    parameter_error: float = 0.0,
) -> Metrics:
    """Read the counters of all units. Waits for the device.

    Args:
        parameter_bytes: sent, what FSDP's own all-gathers would have sent, and sent inside hosts.
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
        inside_wire_bytes=sum(r.inside_bytes for r in reducers),
        parameter_wire_bytes=parameter_bytes[0],
        parameter_dense_bytes=parameter_bytes[1],
        parameter_inside_wire_bytes=parameter_bytes[2],
        parameter_error=parameter_error,
        replica_wire_bytes=sum(r.wire_bytes for r in replicas),
        replica_dense_bytes=_dense_bytes(replicas),
        density_target=selected.target / selected.planned if selected.planned else 1.0,
        density=selected.selected / selected.selectable if selected.selectable else nothing,
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
