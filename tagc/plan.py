"""From rules to segments: what every parameter will cost on the wire, before any step.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
so it does in the all-gather's buffer. Adjacent parameters that share rule and role form a
*segment*, which is compressed as one. In FSDP1's buffer, which is cut into rows regardless of
parameters (see :mod:`tagc.pieces`), all parameters that share a rule form one.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import torch

from tagc.codec_plans import (
    MIN_SHARED,
    CodecPlan,
    DensePlan,
    MatrixPlan,
    PackedPlan,
    QuantizedPlan,
    ResolvedCodec,
    SketchPlan,
    plan_codec,
)
from tagc.matrix import shard_shape
from tagc.ops import COUNTS
from tagc.pieces import FlatBuffer, columns_of, filled
from tagc.plan_table import Row, as_list, as_text, format_bytes
from tagc.policy import ParameterRule, ParamInfo, Policy, PolicyError, Rule, When, first_match
from tagc.policy_codecs import (
    AutoCodec,
    DenseCodec,
    Feedback,
    MatrixCodec,
    QuantizedCodec,
    QuantizedParameters,
)

Direction = Literal["gradients", "parameters", "replicas"]


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it.

    Attributes:
        columns: elements in every shard, padding included; FSDP1: in the shard that has most.
        dim: FSDP2: dimension of ``shape`` that is sharded.
        start: FSDP1 only: its first element in the flat buffer.
        local: FSDP2: shape of every shard, padding included. (With tensor parallelism ``shape``
            does not say.)
    """

    name: str
    shape: tuple[int, ...]
    columns: int
    dim: int = 0
    start: int | None = None
    local: tuple[int, ...] | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One collective of one FSDP unit.

    Attributes:
        params: in the order of FSDP's buffer.
        world_size: ranks that take part.
        dtype: of the buffer, which is ``[world_size, sum of columns]``.
        per_step: how often it runs in a step: 2 for the all-gather of a unit that FSDP reshards
            after forward.
        flat: FSDP1's buffer, in which parameters have no columns of their own.
    """

    name: str
    params: tuple[UnitParam, ...]
    world_size: int
    dtype: torch.dtype
    per_step: int = 1
    flat: FlatBuffer | None = None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Columns ``start`` to ``stop`` of a unit, which travel by one codec.

    Attributes:
        role: of its parameters; ``mixed`` in a flat buffer, where they need not share one.
    """

    start: int
    stop: int
    params: tuple[UnitParam, ...]
    role: str
    rule: int | None
    codec: CodecPlan

    @property
    def columns(self) -> int:
        """Elements of the segment in one shard."""
        return self.stop - self.start

    @property
    def compressed(self) -> bool:
        """Whether anything but the buffer itself travels."""
        return not getattr(self.codec, "native", False)


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The segments of one unit in one direction, in column order, without gaps."""

    info: UnitInfo
    segments: tuple[Segment, ...]
    direction: Direction = "gradients"

    @property
    def columns(self) -> int:
        """Elements of one shard of the unit, as the segments arrange it."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def buffer_columns(self) -> int:
        """Elements of one shard of FSDP's own buffer."""
        return self.columns if self.info.flat is None else self.info.flat.columns

    def dense_columns(self, params: Sequence[UnitParam]) -> float:
        """Columns of FSDP's buffer that these parameters take; where that is flat, their share of
        it."""
        if self.info.flat is None:
            return sum(param.columns for param in params)
        numel, total = (sum(math.prod(p.shape) for p in ps) for ps in (params, self.info.params))
        return self.info.flat.columns * numel / max(1, total)

    @property
    def for_all(self) -> bool:
        """Whether all ranks get the same message, and decode the same."""
        return self.direction != "gradients"

    @property
    def destinations(self) -> int:
        """Messages that a rank makes: one to every owner, or one for all."""
        return 1 if self.for_all else self.info.world_size

    @property
    def compressed(self) -> tuple[Segment, ...]:
        """The segments that do not travel as they are."""
        return tuple(s for s in self.segments if s.compressed)

    @property
    def dense(self) -> tuple[Segment, ...]:
        """The segments that do."""
        return tuple(s for s in self.segments if not s.compressed)

    def of(self, *kinds: type[CodecPlan]) -> tuple[Segment, ...]:
        """The segments with such codecs."""
        return tuple(s for s in self.segments if isinstance(s.codec, kinds))

    @property
    def sketched(self) -> tuple[Segment, ...]:
        """The segments that travel as sketches."""
        return self.of(SketchPlan)

    @property
    def warmup_steps(self) -> int:
        """Reductions of the whole unit that go dense first: the most that any segment asks for."""
        return max((s.codec.warmup_steps for s in self.segments), default=0)

    @property
    def words(self) -> int:
        """int32 words of the unit's message to one destination."""
        return sum(s.codec.words for s in self.segments)

    @cached_property
    def sent(self) -> tuple[slice, ...] | None:
        """Words of the message to each owner that are sent; None for all of them.

        In a flat buffer an owner may have nothing of the first segments, or of the last, and of
        dense ones less than another.
        """
        if self.info.flat is None:
            return None
        spans = [(self.words, 0)] * self.info.world_size
        at = 0
        for segment in self.message:
            codec = segment.codec
            for row, columns in enumerate(filled(self.info, segment.params)):
                used = codec.words if columns else 0
                if isinstance(codec, DensePlan):
                    used = replace(codec, numel=columns).words
                if getattr(codec, "shared", False):
                    used = codec.words  # what a rank chose for its own shard goes to all
                if used:
                    spans[row] = (min(spans[row][0], at), at + used)
            at += codec.words
        return tuple(slice(min(start, stop), stop) for start, stop in spans)

    @property
    def message(self) -> tuple[Segment, ...]:
        """The segments in the order in which their words follow each other in a message."""
        kinds = (SketchPlan, PackedPlan, QuantizedPlan, MatrixPlan, DensePlan)
        return tuple(segment for kind in kinds for segment in self.of(kind))

    def sent_words(self, segment: Segment) -> float:
        """Words of a segment in a message; in a flat buffer, on average over all owners."""
        if self.sent is None:
            return segment.codec.words
        before = self.message[: self.message.index(segment)]
        start = sum(s.codec.words for s in before)
        stop = start + segment.codec.words
        parts = (min(stop, span.stop) - max(start, span.start) for span in self.sent)
        return sum(max(0, words) for words in parts) / self.info.world_size

    @property
    def kept(self) -> bool:
        """Whether the message of the forward's all-gather serves the backward's, too."""
        plans = (s.codec for s in self.of(QuantizedPlan))
        return self.info.per_step > 1 and any(
            isinstance(plan, QuantizedPlan) and plan.keep_for_backward for plan in plans
        )

    def dense_bytes(self, columns: float) -> float:
        """Bytes that a rank sends in a step for so many columns uncompressed."""
        others = self.info.world_size - 1
        if self.direction == "replicas":  # an all-reduce of one shard
            return 2 * others / self.info.world_size * columns * self.info.dtype.itemsize
        return others * columns * self.info.dtype.itemsize * self.info.per_step

    def wire_bytes(self, segment: Segment) -> float:
        """Bytes that a rank sends in a step for a segment, its share of the counts included."""
        if not self.compressed:
            return self.dense_bytes(self.dense_columns(segment.params))
        W = self.info.world_size
        words = (W - 1) * self.sent_words(segment) * (1 if self.kept else self.info.per_step)
        if isinstance(segment.codec, SketchPlan):
            reduced = 2 * (W - 1) / W
            summed = reduced if self.for_all else W - 1
            words += summed * segment.codec.cells + reduced * self.destinations * COUNTS
        return 4 * words

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes that a rank stores for a segment between steps: residual, what it keeps as an
        owner, kept message."""
        feedback = segment.codec.feedback
        residual = feedback.element_bytes * segment.columns if feedback else 0
        average = 4 * segment.columns if feedback and feedback.hands_out else 0
        message = 4 * segment.codec.words * self.info.world_size if self.kept else 0
        return round(self.destinations * residual) + average + message


@dataclass(frozen=True)
class Plan:
    """What ``tagc.wrap`` does to every parameter. ``str(plan)`` is a table.

    Attributes:
        units: gradients in the reduce-scatter.
        parameters: parameters in the all-gather; empty where the policy does not mention them.
        replicas: gradients in the all-reduce across replicas; likewise.
        notes: what ``codec: auto`` was decided by, and how.
    """

    policy: Policy
    units: tuple[UnitPlan, ...]
    parameters: tuple[UnitPlan, ...] = ()
    replicas: tuple[UnitPlan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def all_units(self) -> tuple[UnitPlan, ...]:
        """Every direction."""
        return self.units + self.parameters + self.replicas

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row a parameter and direction, in the order of FSDP's buffers."""
        return tuple(_row(u, s, p) for u in self.all_units for s in u.segments for p in s.params)

    @property
    def warmup_steps(self) -> int:
        """Reductions that go dense before any unit is compressed in full."""
        return max((unit.warmup_steps for unit in self.all_units), default=0)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that ranks must agree on to exchange messages."""
        content = [
            [u.direction, repr(u.info), *map(repr, u.segments)]  # frozen dataclasses to the leaves
            for u in self.all_units
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __str__(self) -> str:
        return as_text(self.policy.name, self.rows, self.warmup_steps, self.notes)


def _row(unit: UnitPlan, segment: Segment, param: UnitParam) -> Row:
    columns = unit.dense_columns([param])
    share = wire_share = columns / (unit.dense_columns(segment.params) or 1)
    if isinstance(segment.codec, MatrixPlan):
        # Every matrix has a message of its own, with scales.
        layout = segment.codec.layouts[segment.params.index(param)]
        wire_share = layout.words / segment.codec.words
    return Row(
        direction=unit.direction,
        unit=unit.info.name or "(root)",
        param=param.name,
        shape=param.shape,
        role=ParamInfo.of(param.name, param.shape).role,
        codec=segment.codec.name,
        density=segment.codec.density,
        dense_bytes=unit.dense_bytes(columns),
        wire_bytes=unit.wire_bytes(segment) * wire_share,
        stored_bytes=unit.stored_bytes(segment) * share,
    )


_MOMENTUM = (
    "feedback 'momentum' hands out a moving average of gradients: set the optimizer's own first "
    "momentum to 0, as with AdamW(betas=(0.0, 0.95)), and tune its learning rate anew"
)

# Where nothing is said about replicas, their gradients must be averaged all the same.
_DENSE = (Rule(when=When(), codec=DenseCodec()),)

# What messages can be made of.
COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)

# What `codec: auto` chooses from, in bits per element; parameters stop at 8.
AUTO_BITS = (32, 16, 8, 4)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several plans of a unit, and why."""

    index: int
    why: str


class Choose(Protocol):
    """Resolves ``codec: auto``, for a unit as a whole: what compresses one segment takes all of
    the unit from the backend's own collective to messages.

    Attributes:
        notes: what the choices rest on.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        """Choose among plans of the unit at ``position``, the least compressed first. All ranks
        must choose alike."""
        ...


def build_plan(
    units: Sequence[UnitInfo],
    policy: Policy,
    *,
    gathers: Sequence[UnitInfo] = (),
    replicas: Sequence[UnitInfo] = (),
    choose: Choose | None = None,
) -> Plan:
    """Apply a policy to the units of a model.

    Args:
        units: the reduce-scatter of every unit.
        gathers: the all-gather of every unit; needed for rules about parameters.
        replicas: the all-reduce of every unit's shard; needed for rules about replicas.
        choose: resolves ``codec: auto``, given the position of a unit in these lists.

    Raises:
        PolicyError: if the policy means to compress and compresses nothing here.
    """
    matched: set[tuple[Direction, int]] = set()
    chosen: dict[tuple[Direction, str], list[str]] = {}

    def applied(
        infos: Sequence[UnitInfo],
        rules: Sequence[Rule | ParameterRule],
        direction: Direction,
    ) -> tuple[UnitPlan, ...]:
        if not rules:
            return ()
        return tuple(one(i, info, rules, direction) for i, info in enumerate(infos))

    def one(
        i: int, info: UnitInfo, rules: Sequence[Rule | ParameterRule], direction: Direction
    ) -> UnitPlan:
        options = _plan_unit(info, rules, direction, matched)
        if len(options) == 1:
            return options[0]
        if choose is None:
            raise PolicyError("codec 'auto' needs a measured or a given link to choose by")
        choice = choose(i, options)
        chosen.setdefault((direction, choice.why), []).append(info.name or "(root)")
        return options[choice.index]

    directions = (
        applied(units, policy.gradients, "gradients"),
        applied(gathers, policy.parameters, "parameters"),
        applied(replicas, policy.replicas or _DENSE, "replicas"),
    )
    notes = [*choose.notes] if choose and chosen else []
    notes += [f"{d} of {as_list(names)}: {why}" for (d, why), names in chosen.items()]
    notes += [
        note
        for plans, rules in zip(
            directions, (policy.gradients, (), policy.replicas or _DENSE), strict=True
        )
        for note in _unshared(plans, rules)
    ]
    segments = [s for units in directions for unit in units for s in unit.segments]
    if any(s.codec.feedback is not None and s.codec.feedback.rate for s in segments):
        notes.append(_MOMENTUM)
    plan = Plan(policy, *directions, notes=tuple(notes))
    _check_effect(plan, matched)
    return plan


def _unshared(units: Sequence[UnitPlan], rules: Sequence[Rule]) -> Iterator[str]:
    """Which parameters' ranks keep groups of their own, although their rule wants shared ones."""
    names = [
        param.name
        for unit in units
        for segment in unit.segments
        if rules
        and segment.rule is not None
        and segment.columns
        and getattr(rules[segment.rule].codec, "support", "own") == "shared"
        and not getattr(segment.codec, "shared", False)
        for param in segment.params
    ]
    if names:
        yield (
            f"{units[0].direction} of {as_list(names)}: fewer than {MIN_SHARED} groups to keep, so "
            "every rank keeps its own instead of shared ones"
        )


def _check_effect(plan: Plan, matched: set[tuple[Direction, int]]) -> None:
    policy = plan.policy
    rules = [
        (direction, i, rule)
        for direction in ("gradients", "parameters", "replicas")
        for i, rule in enumerate(getattr(policy, direction))
    ]
    means_to = [f"{d}[{i}]" for d, i, rule in rules if rule.codec.compresses]
    automatic = any(isinstance(rule.codec, AutoCodec) for _, _, rule in rules)
    selected = any((d, i) in matched for d, i, rule in rules if rule.codec.compresses)
    compressed = selected if automatic else any(unit.compressed for unit in plan.all_units)
    if means_to and not compressed:
        names = [p.name for u in plan.units for s in u.segments for p in s.params]
        raise PolicyError(
            f"policy {policy.name!r} compresses nothing in this model: none of its rules "
            f"({', '.join(means_to)}) selects any of the {len(names)} parameters "
            f"({', '.join(names[:4])}{', …' if len(names) > 4 else ''}), whose roles are "
            f"{', '.join(sorted({ParamInfo.of(n, ()).role for n in names}))}. 1-D parameters and "
            "small ones are dense unless a rule names them; to compress nothing, use policy 'dense'"
        )
    for direction, i, rule in rules:
        if (direction, i) not in matched and rule.when != When():
            warnings.warn(
                f"policy {policy.name!r}: rule {direction}[{i}] matches no parameter of this model",
                stacklevel=4,
            )
    dense, wire = (sum(getattr(r, n) for r in plan.rows) for n in ("dense_bytes", "wire_bytes"))
    if means_to and not automatic and wire >= dense > 0:
        warnings.warn(
            f"policy {policy.name!r} sends {format_bytes(wire)} per step at this number of ranks, "
            f"dense {format_bytes(dense)}: do not compress here, or ask for a lower density",
            stacklevel=4,
        )


@dataclass
class _Run:
    """Parameters that become a segment."""

    rule: int | None
    role: str
    params: list[UnitParam] = field(default_factory=list)


def _plan_unit(
    unit: UnitInfo,
    rules: Sequence[Rule | ParameterRule],
    direction: Direction,
    matched: set[tuple[Direction, int]],
) -> list[UnitPlan]:
    """The unit's plan, or all that ``codec: auto`` may become, the least compressed first."""
    runs: list[_Run] = []
    for param in unit.params:
        info = ParamInfo.of(param.name, param.shape)
        index = first_match(rules, info)
        if index is not None:
            matched.add((direction, index))
        last = [run for run in runs[-1:] if run.role == info.role]
        # Where it is rearranged anyway, what shares a rule need not be adjacent, nor of one role.
        run = next((r for r in (last if unit.flat is None else runs) if r.rule == index), None)
        if run is None:
            run = _Run(rule=index, role=info.role)
            runs.append(run)
        run.params.append(param)
        if run.role != info.role:
            run.role = "mixed"

    def with_bits(bits: int) -> UnitPlan:
        segments: list[Segment] = []
        start = 0
        for run in runs:
            stop = start + columns_of(unit, run.params)
            rule = None if run.rule is None else rules[run.rule]
            segments.append(
                Segment(
                    start=start,
                    stop=stop,
                    params=tuple(run.params),
                    role=run.role,
                    rule=run.rule,
                    codec=_plan_segment(rule, unit, run.params, stop - start, bits),
                )
            )
            start = stop
        return UnitPlan(info=unit, segments=tuple(segments), direction=direction)

    used = [rules[run.rule].codec for run in runs if run.rule is not None]
    # What cannot be compressed is left as it is.
    automatic = unit.dtype in COMPRESSIBLE and any(isinstance(c, AutoCodec) for c in used)
    # min_bits makes some of them equal.
    options = dict.fromkeys(map(with_bits, AUTO_BITS if automatic else AUTO_BITS[:1]))
    for option in options:
        _check_dtype(option)
    return list(options)


def _check_dtype(unit: UnitPlan) -> None:
    # FSDP gathers several dtypes as bytes; `tagc.wrap` has better words for that.
    if unit.compressed and unit.info.dtype not in (*COMPRESSIBLE, torch.uint8):
        what, remedy = {
            True: ("gathers parameters", "param_dtype"),
            False: ("reduces gradients", "reduce_dtype"),
        }[unit.direction == "parameters"]
        names = as_list([p.name for s in unit.compressed for p in s.params])
        raise PolicyError(
            f"unit {unit.info.name or '(root)'!r} {what} of {unit.info.dtype}, which only the "
            f"codec 'dense' can send; give it a MixedPrecisionPolicy({remedy}=torch.float32), or "
            f"leave out of the policy: {names}"
        )


def _plan_segment(
    rule: Rule | ParameterRule | None,
    unit: UnitInfo,
    params: Sequence[UnitParam],
    columns: int,
    auto_bits: int,
) -> CodecPlan:
    codec = DenseCodec() if rule is None else rule.codec
    feedback = rule.feedback if isinstance(rule, Rule) else Feedback(kind="none")
    if isinstance(codec, AutoCodec):
        codec = resolve_auto(codec, auto_bits, parameters=isinstance(rule, ParameterRule))
    return plan_codec(
        codec,
        feedback,
        columns=columns,
        world_size=unit.world_size,
        dtype=unit.dtype,
        matrices=_matrices(unit, params) if isinstance(codec, MatrixCodec) else (),
    )


def _matrices(unit: UnitInfo, params: Sequence[UnitParam]) -> list[tuple[int, int]]:
    """Rows and columns of what a shard has of every parameter."""
    if unit.flat is not None:
        raise PolicyError(
            f"unit {unit.name or '(root)'!r} is sharded by FSDP1, which cuts through rows, so "
            "codec 'matrix' has none to scale; use fully_shard (FSDP2), or codec 'quantized'"
        )
    vectors = [p.name for p in params if len(p.shape) < 2]
    if vectors:
        raise PolicyError(
            f"codec 'matrix' needs rows and columns, but unit {unit.name or '(root)'!r} has "
            f"{as_list(vectors)} with one dimension only; give such parameters codec 'quantized' "
            "or 'dense'"
        )
    return [
        shard_shape(p.shape, p.dim, p.columns)
        if p.local is None
        else shard_shape(p.local, 0, p.columns)
        for p in params
    ]


def resolve_auto(codec: AutoCodec, bits: int, *, parameters: bool) -> ResolvedCodec:
    """The codec of so many bits, or of as few as the rule allows."""
    bits = max(bits, codec.min_bits, 8 if parameters else 4)
    if bits == 32:
        return DenseCodec()
    if bits == 16:
        return DenseCodec(wire="bfloat16")
    if parameters:
        return QuantizedParameters(bits=8)
    return QuantizedCodec(bits=8 if bits == 8 else 4)
