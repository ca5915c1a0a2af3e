"""Counts of what compression has done since ``tagc.wrap``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from tagc.attach import Unit
from tagc.collect import UnitGatherer, UnitReducer
from tagc.groups.mesh import DimensionBytes, bytes_by_dimension
from tagc.plan import Plan, format_bytes
from tagc.policy import Tuning


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Counts of one rank since ``tagc.wrap``. ``str(metrics)`` is a table, :meth:`as_dict` is for
    loggers.

    Bytes are the bytes that this rank sent to other ranks: gradients in the reduce-scatter, unless
    the name says otherwise. If the ranks of a host add up first, only bytes to other hosts count.
    Densities are fractions of the elements of sparse codecs, averaged over the steps after the
    warm-up; NaN before.

    Attributes:
        steps: reductions of the unit with the most of them.
        warming_up: dense reductions left until the last unit is compressed; 0 after that.
        wire_bytes: bytes sent, all parameters.
        compressed_wire_bytes: bytes sent for compressed parameters, including index and counts.
        dense_bytes: bytes that as many dense reduce-scatters would have sent, all parameters; in
            two levels if tagc's are.
        compressed_dense_bytes: the part of ``dense_bytes`` for compressed parameters.
        inside_wire_bytes: bytes of gradients sent to ranks of the same host, to add them up; 0 if
            every rank sends for itself.
        parameter_wire_bytes: bytes sent in all-gathers; 0 if the policy leaves them to FSDP.
        parameter_dense_bytes: bytes that FSDP's own all-gathers would have sent; 0 if the policy
            leaves them to FSDP.
        parameter_inside_wire_bytes: bytes of parameters sent to ranks of the same host, which pass
            on what other hosts sent.
        parameter_error: Euclidean norm of the current change of this rank's parameters by
            quantization, relative to the norm of the parameters.
        parameter_bits: bits an element of the last messages about parameters, of units that
            compress any: with codec ``exact`` they differ from step to step; NaN before the first.
        native_parameter_bytes: bytes of the all-gathers that FSDP did itself, because the policy
            leaves parameters to it, as ``plan()`` counts them for as many reductions: micro-batches
            that reduce nothing, and gathers in smaller groups, are not seen. 0 if tagc sends the
            parameters, and with FSDP1, where it does not know them.
        total_wire_bytes: bytes of gradients, parameters and replicas together, those that FSDP
            sent itself included.
        total_dense_bytes: the same without compression.
        replica_wire_bytes: bytes sent to other replicas.
        replica_dense_bytes: bytes that an all-reduce of the shards would have sent.
        density_target: the policy's density, averaged over elements.
        density: fraction that this rank kept.
        union_density: fraction of this rank's own shard that any rank kept (sketches only).
        unresolved: groups of this rank's shard that could not be decoded and went to the residual;
            0 is normal.
        residual_norm: Euclidean norm of this rank's residual now.
        noise_factor: RMS of the gradients after the codecs relative to dense, averaged over
            compressed elements, as ranks last agreed on it; NaN if it is not measured
            (:meth:`tagc.Compressor.keep_rates`).
        rate_factor, norm_factor: the policy's best learning rate and the norm of its gradients,
            relative to dense; NaN if the policy does not state it (``tuning``).
        dimensions: bytes that this process's groups of backend ``tagc`` sent for activations since
            they were made, by mesh dimension; :meth:`as_dict` has keys such as ``tp_wire_bytes``.
    """

    steps: int
    warming_up: int
    wire_bytes: int
    compressed_wire_bytes: int
    dense_bytes: int
    compressed_dense_bytes: int
    inside_wire_bytes: int
    parameter_wire_bytes: int
    parameter_dense_bytes: int
    parameter_inside_wire_bytes: int
    parameter_error: float
    parameter_bits: float
    native_parameter_bytes: int
    total_wire_bytes: int
    total_dense_bytes: int
    replica_wire_bytes: int
    replica_dense_bytes: int
    density_target: float
    density: float
    union_density: float
    unresolved: int
    residual_norm: float
    noise_factor: float
    rate_factor: float
    norm_factor: float
    dimensions: Mapping[str, DimensionBytes] = field(default_factory=dict)

    def as_dict(self) -> dict[str, float]:
        """All values by name, for loggers: ``wandb.log(metrics.as_dict())``."""
        values = asdict(self)
        for name, sent in values.pop("dimensions").items():
            values |= {f"{name}_{key}": count for key, count in sent.items()}
        return values

    def __str__(self) -> str:
        rows = [
            ("gradients", self.wire_bytes, self.dense_bytes),
            ("- compressed", self.compressed_wire_bytes, self.compressed_dense_bytes),
            (
                "parameters",
                self.parameter_wire_bytes + self.native_parameter_bytes,
                self.parameter_dense_bytes + self.native_parameter_bytes,
            ),
            ("replicas", self.replica_wire_bytes, self.replica_dense_bytes),
            ("together", self.total_wire_bytes, self.total_dense_bytes),
            *((name, s.wire_bytes, s.dense_bytes) for name, s in self.dimensions.items()),
        ]
        lines = [f"{'steps ' + str(self.steps):<14}{'sent':>12}{'dense':>12}{'ratio':>9}"]
        lines += [
            f"{name:<14}{format_bytes(sent):>12}{format_bytes(dense):>12}"
            + (f"{dense / sent:8.2f}x" if sent else "")
            for name, sent, dense in rows
            if dense
        ]
        if self.warming_up:
            lines.append(
                f"warming up: {self.warming_up} more reductions go dense before all is compressed"
            )
        inside = self.inside_wire_bytes + self.parameter_inside_wire_bytes
        if inside:
            lines.append(f"inside hosts: {format_bytes(inside)}")
        if self.density_target < 1:
            union = "" if math.isnan(self.union_density) else f", union {self.union_density:.1%}"
            lines.append(
                f"density {self.density:.1%} of {self.density_target:.1%} asked for{union}; "
                f"{self.unresolved} groups unresolved"
            )
        lines.append(f"residual norm {self.residual_norm:.3g}")
        if self.parameter_error:
            lines[-1] += f"; parameters off by {self.parameter_error:.2%}"
        if not math.isnan(self.parameter_bits):
            lines[-1] += f"; {self.parameter_bits:.2f} bits a parameter in the last gather"
        if not math.isnan(self.noise_factor):
            lines.append(f"gradients {self.noise_factor:.2f} times as large as dense ones")
        elif not math.isnan(self.rate_factor):
            norm = None if math.isnan(self.norm_factor) else self.norm_factor
            lines.append(Tuning(rate_factor=self.rate_factor, norm_factor=norm).advice)
        return "\n".join(lines)


def collect(
    plan: Plan,
    reducers: Sequence[UnitReducer],
    replicas: Sequence[UnitReducer],
    gathering: Sequence[tuple[Unit, UnitGatherer]],
    *,
    noise_factor: float,
) -> Metrics:
    """Read the counters of all units. Waits for the device."""
    all_reducers, gatherers = [*reducers, *replicas], [gatherer for _, gatherer in gathering]
    squares = [gatherer.relative_error(unit.shard()) for unit, gatherer in gathering]
    whole = sum(square for _, square in squares)
    # Elements of sparse codecs, summed over the steps.
    counts = [(count, r) for r in all_reducers for count in r.selection_counts()]
    elements = sum(c.elements for c, _ in counts)
    selectable = sum(
        c.elements * r.counters.compressed_steps * r.plan.messages.made for c, r in counts
    )
    unions = [
        (c.union, c.elements * r.counters.compressed_steps)
        for c, r in counts
        if c.union is not None
    ]
    norms = [
        torch.linalg.vector_norm(residual.float(), dtype=torch.float64).item()
        for r in all_reducers
        for residual in (*r.residuals.values(), *r.owner_residuals.values())
    ]
    left = [r.plan.warmup_steps - r.counters.all_steps for r in all_reducers if r.plan.compressed]
    nothing = math.nan if elements else 1.0
    steps = max((r.counters.steps for r in reducers), default=0)
    # Of FSDP's own all-gathers, also because no rule for parameters compresses any.
    by_fsdp = () if gatherers else plan.parameters or plan.native
    native = int(steps * sum(unit.dense_bytes(unit.columns) for unit in by_fsdp))
    tuning = plan.policy.tuning
    parameters = sum(g.wire_bytes for g in gatherers), sum(g.dense_bytes for g in gatherers)
    sent = [g for g in gatherers if g.last_bytes]
    return Metrics(
        steps=steps,
        warming_up=max([0, *left]),
        wire_bytes=sum(r.wire_bytes for r in reducers),
        compressed_wire_bytes=sum(r.compressed_wire_bytes for r in reducers),
        dense_bytes=_dense_bytes(reducers),
        compressed_dense_bytes=_dense_bytes(reducers, compressed=True),
        inside_wire_bytes=sum(r.counters.inside_bytes for r in reducers),
        parameter_wire_bytes=parameters[0],
        parameter_dense_bytes=parameters[1],
        parameter_inside_wire_bytes=sum(g.inside_bytes for g in gatherers),
        parameter_error=_share(sum(error for error, _ in squares), whole, 0.0) ** 0.5,
        parameter_bits=_share(
            8 * sum(g.last_bytes for g in sent),
            sum((g.plan.peers - 1) * g.plan.columns for g in sent),
            math.nan,
        ),
        native_parameter_bytes=native,
        total_wire_bytes=sum(r.wire_bytes for r in all_reducers) + parameters[0] + native,
        total_dense_bytes=_dense_bytes(all_reducers) + parameters[1] + native,
        replica_wire_bytes=sum(r.wire_bytes for r in replicas),
        replica_dense_bytes=_dense_bytes(replicas),
        density_target=_share(sum(c.target * c.elements for c, _ in counts), elements, 1.0),
        density=_share(sum(c.selected for c, _ in counts), selectable, nothing),
        union_density=_share(sum(u for u, _ in unions), sum(own for _, own in unions), nothing),
        unresolved=sum(c.unresolved for c, _ in counts),
        residual_norm=math.hypot(*norms),
        noise_factor=noise_factor,
        rate_factor=tuning.rate_factor if tuning else math.nan,
        norm_factor=tuning.norm_factor if tuning and tuning.norm_factor else math.nan,
        dimensions=bytes_by_dimension(),
    )


def _share(part: float, whole: float, nothing: float) -> float:
    return part / whole if whole else nothing


def _dense_bytes(reducers: Sequence[UnitReducer], *, compressed: bool = False) -> int:
    total = 0
    for reducer in reducers:
        plan, columns = reducer.plan, reducer.plan.buffer_columns
        if compressed:
            columns = sum(plan.dense_columns(s.params) for s in plan.compressed)
        total += int(plan.dense_bytes(columns)) * reducer.counters.steps
    return total
