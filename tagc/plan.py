"""From rules to segments: what every parameter's gradient will cost, before any step.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row.
Adjacent parameters that share rule and role form a *segment*, which is compressed as one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tagc.layout import SketchLayout, plan_layout
from tagc.policy import ParamInfo, Policy, PolicyError, Rule, SketchCodec, When
from tagc.symbols import Symbol, resolve_symbol

# Room above the target density, per destination: what a step selects beyond it waits a step.
SLACK = 1.0625


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it: ``columns`` elements (padding included) in every shard."""

    name: str
    shape: tuple[int, ...]
    columns: int


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One FSDP unit: its reduce-scatter buffer is ``[world_size, sum of columns]`` of ``dtype``."""

    name: str
    params: tuple[UnitParam, ...]
    world_size: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class SketchPlan:
    """How one segment is sketched.

    Attributes:
        capacity: groups that a rank keeps at most, per destination.
        levels: largest quantized magnitude that a rank sends.
        residual_dtype: storage of the feedback, None without feedback.
        warmup_steps: reductions that go dense first.
    """

    layout: SketchLayout
    density: float
    capacity: int
    levels: int
    residual_dtype: torch.dtype | None
    warmup_steps: int

    @property
    def symbol(self) -> Symbol:
        """Format of a group."""
        return self.layout.symbol

    @property
    def max_boost(self) -> float:
        """Largest factor on the quantization step that lets every kept group send something."""
        if not self.symbol.integer:
            return 1.0
        return max(1.0, 2.0 ** (self.symbol.step_shift(self.levels) + 1))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Columns ``start`` to ``stop`` of a unit, reduced by one codec; ``sketch`` None is dense."""

    start: int
    stop: int
    params: tuple[UnitParam, ...]
    role: str
    rule: int | None
    sketch: SketchPlan | None

    @property
    def columns(self) -> int:
        """Elements of the segment in one shard."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The segments of one unit, in column order, without gaps."""

    info: UnitInfo
    segments: tuple[Segment, ...]

    @property
    def columns(self) -> int:
        """Elements of one shard of the unit."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def sketched(self) -> tuple[Segment, ...]:
        """The segments that travel as sketches."""
        return tuple(s for s in self.segments if s.sketch is not None)

    @property
    def warmup_steps(self) -> int:
        """Reductions of the whole unit that go dense first: the most that any segment asks for."""
        return max((s.sketch.warmup_steps for s in self.segments if s.sketch), default=0)

    @property
    def dense(self) -> tuple[Segment, ...]:
        """The segments that do not."""
        return tuple(s for s in self.segments if s.sketch is None)

    def dense_bytes(self, columns: int) -> int:
        """Bytes that a rank sends for so many columns uncompressed."""
        return (self.info.world_size - 1) * columns * self.info.dtype.itemsize

    def wire_bytes(self, segment: Segment) -> float:
        """Bytes that a rank sends for a segment, its share of the counts included."""
        if segment.sketch is None:
            return self.dense_bytes(segment.columns)
        W, layout = self.info.world_size, segment.sketch.layout
        counts = 2 * (W - 1) / W * W * 4
        return 4 * ((W - 1) * (layout.index_words + layout.cells) + counts)

    def residual_bytes(self, segment: Segment) -> int:
        """Bytes of residual that a rank stores for a segment."""
        dtype = segment.sketch and segment.sketch.residual_dtype
        return self.info.world_size * segment.columns * dtype.itemsize if dtype else 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of the plan; bytes are those that this rank sends in a step."""

    unit: str
    param: str
    shape: tuple[int, ...]
    role: str
    codec: str
    density: float
    dense_bytes: float
    wire_bytes: float
    residual_bytes: float


@dataclass(frozen=True)
class Plan:
    """What ``tagc.wrap`` does to every parameter's gradient. ``str(plan)`` is a table."""

    policy: Policy
    units: tuple[UnitPlan, ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row a parameter, in the order of FSDP's buffers."""
        return tuple(
            Row(
                unit=unit.info.name or "(root)",
                param=param.name,
                shape=param.shape,
                role=segment.role,
                codec="dense" if sketch is None else f"sketch {sketch.symbol.name}",
                density=1.0 if sketch is None else sketch.density,
                dense_bytes=unit.dense_bytes(param.columns),
                wire_bytes=unit.wire_bytes(segment) * param.columns / max(1, segment.columns),
                residual_bytes=unit.residual_bytes(segment)
                * param.columns
                / max(1, segment.columns),
            )
            for unit in self.units
            for segment in unit.segments
            for sketch in (segment.sketch,)
            for param in segment.params
        )

    @property
    def fingerprint(self) -> str:
        """Hash of everything that ranks must agree on to exchange sketches."""
        content = [
            [u.info.name, u.info.world_size, str(u.info.dtype), [repr(s) for s in u.segments]]
            for u in self.units
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __str__(self) -> str:
        head = (
            "unit",
            "parameter",
            "shape",
            "role",
            "codec",
            "density",
            "dense",
            "wire",
            "residual",
        )
        body = [
            (
                r.unit,
                r.param,
                "×".join(map(str, r.shape)) or "scalar",
                r.role,
                r.codec,
                f"{r.density:g}" if r.density < 1 else "",
                format_bytes(r.dense_bytes),
                format_bytes(r.wire_bytes),
                format_bytes(r.residual_bytes) if r.residual_bytes else "",
            )
            for r in self.rows
        ]
        dense, wire, kept = (
            sum(getattr(r, name) for r in self.rows)
            for name in ("dense_bytes", "wire_bytes", "residual_bytes")
        )
        total = ("total", *[""] * 5, *(format_bytes(b) for b in (dense, wire, kept)))
        widths = [max(map(len, column)) for column in zip(head, *body, total, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 5 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (head, tuple("-" * w for w in widths), *body, total)
        ]
        ratio = f"{dense / wire:.2f}" if wire else "1.00"
        warmup = max((unit.warmup_steps for unit in self.units), default=0)
        return "\n".join(
            [
                f"policy {self.policy.name}: a rank sends {format_bytes(wire)} of gradient per "
                f"step, {ratio} times less than dense ({format_bytes(dense)})"
                + (f", after {warmup} dense steps" if warmup else ""),
                *lines,
            ]
        )


def format_bytes(n: float) -> str:
    """Bytes for people: 1234567 is '1.18 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def build_plan(units: Sequence[UnitInfo], policy: Policy) -> Plan:
    """Apply a policy to the units of a model.

    Raises:
        PolicyError: if the policy means to compress and compresses nothing here.
    """
    matched: set[int] = set()
    plans = tuple(_plan_unit(unit, policy, matched) for unit in units)
    means_to = [i for i, rule in enumerate(policy.gradients) if rule.codec.compresses]
    if means_to and not any(unit.sketched for unit in plans):
        names = [p.name for u in units for p in u.params]
        raise PolicyError(
            f"policy {policy.name!r} compresses nothing in this model: none of its rules "
            f"{means_to} selects any of the {len(names)} parameters "
            f"({', '.join(names[:4])}{', …' if len(names) > 4 else ''}), whose roles are "
            f"{', '.join(sorted({ParamInfo.of(n, ()).role for n in names}))}. 1-D parameters and "
            "small ones are dense unless a rule names them; to compress nothing, use policy 'dense'"
        )
    for i, rule in enumerate(policy.gradients):
        if i not in matched and rule.when != When():
            warnings.warn(
                f"policy {policy.name!r}: rule gradients[{i}] matches no parameter of this model",
                stacklevel=3,
            )
    plan = Plan(policy, plans)
    dense, wire = (sum(getattr(r, n) for r in plan.rows) for n in ("dense_bytes", "wire_bytes"))
    if means_to and wire >= dense > 0:
        warnings.warn(
            f"policy {policy.name!r} sends {format_bytes(wire)} per step at this number of ranks, "
            f"dense {format_bytes(dense)}: do not compress here, or ask for a lower density",
            stacklevel=3,
        )
    return plan


def _plan_unit(unit: UnitInfo, policy: Policy, matched: set[int]) -> UnitPlan:
    segments: list[Segment] = []
    start = 0
    run: list[UnitParam] = []
    run_key: tuple[int | None, str] | None = None

    def close() -> None:
        nonlocal start
        if not run or run_key is None:
            return
        index, role = run_key
        stop = start + sum(p.columns for p in run)
        rule = None if index is None else policy.gradients[index]
        sketch = _plan_sketch(rule, stop - start, unit.world_size)
        segments.append(
            Segment(start=start, stop=stop, params=tuple(run), role=role, rule=index, sketch=sketch)
        )
        run.clear()
        start = stop

    for param in unit.params:
        info = ParamInfo.of(param.name, param.shape)
        index = policy.match(info)
        if index is not None:
            matched.add(index)
        key = (index, info.role)
        if key != run_key:
            close()
        run_key = key
        run.append(param)
    close()
    return UnitPlan(info=unit, segments=tuple(segments))


def _plan_sketch(rule: Rule | None, columns: int, world_size: int) -> SketchPlan | None:
    if rule is None or not isinstance(rule.codec, SketchCodec) or columns == 0:
        return None
    symbol = resolve_symbol(rule.codec.symbol, world_size)
    groups = -(-columns // symbol.lanes)
    capacity = min(groups, int(SLACK * rule.codec.density * groups) + 1)
    return SketchPlan(
        layout=plan_layout(columns, symbol, world_size * capacity),
        density=rule.codec.density,
        capacity=capacity,
        levels=symbol.levels(world_size),
        residual_dtype=(
            getattr(torch, rule.feedback.dtype) if rule.feedback.kind == "residual" else None
        ),
        warmup_steps=rule.codec.warmup_steps,
    )
