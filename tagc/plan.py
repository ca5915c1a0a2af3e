"""From rules to segments: what every parameter will cost on the wire, before any step.

FSDP's reduce-scatter buffer is ``[W, S]``, and a parameter occupies the same columns in each row;
so it does in the all-gather's buffer. Adjacent parameters that share rule and role form a
*segment*, which is compressed as one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch

from tagc.codec_plans import CodecPlan, QuantizedPlan, ResolvedCodec, SketchPlan, plan_codec
from tagc.ops import COUNTS
from tagc.plan_table import Row, as_list, as_text, format_bytes
from tagc.policy import ParameterRule, ParamInfo, Policy, PolicyError, Rule, When, first_match
from tagc.policy_codecs import (
    AutoCodec,
    DenseCodec,
    Feedback,
    QuantizedCodec,
    QuantizedParameters,
)

Direction = Literal["gradients", "parameters", "replicas"]


@dataclass(frozen=True, kw_only=True)
class UnitParam:
    """A parameter as FSDP shards it: ``columns`` elements (padding included) in every shard."""

    name: str
    shape: tuple[int, ...]
    columns: int


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """One collective of one FSDP unit.

    Attributes:
        params: in the order of FSDP's buffer.
        world_size: ranks that take part.
        dtype: of the buffer, which is ``[world_size, sum of columns]``.
        per_step: how often it runs in a step: 2 for the all-gather of a unit that FSDP reshards
            after forward.
    """

    name: str
    params: tuple[UnitParam, ...]
    world_size: int
    dtype: torch.dtype
    per_step: int = 1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Columns ``start`` to ``stop`` of a unit, which travel by one codec."""

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
        """Elements of one shard of the unit."""
        return self.segments[-1].stop if self.segments else 0

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

    @property
    def kept(self) -> bool:
        """Whether the message of the forward's all-gather serves the backward's, too."""
        plans = (s.codec for s in self.of(QuantizedPlan))
        return self.info.per_step > 1 and any(
            isinstance(plan, QuantizedPlan) and plan.keep_for_backward for plan in plans
        )

    def dense_bytes(self, columns: int) -> float:
        """Bytes that a rank sends in a step for so many columns uncompressed."""
        others = self.info.world_size - 1
        if self.direction == "replicas":  # an all-reduce of one shard
            return 2 * others / self.info.world_size * columns * self.info.dtype.itemsize
        return others * columns * self.info.dtype.itemsize * self.info.per_step

    def wire_bytes(self, segment: Segment) -> float:
        """Bytes that a rank sends in a step for a segment, its share of the counts included."""
        if not self.compressed:
            return self.dense_bytes(segment.columns)
        W = self.info.world_size
        words = (W - 1) * segment.codec.words * (1 if self.kept else self.info.per_step)
        if isinstance(segment.codec, SketchPlan):
            reduced = 2 * (W - 1) / W
            summed = reduced if self.for_all else W - 1
            words += summed * segment.codec.cells + reduced * self.destinations * COUNTS
        return 4 * words

    def stored_bytes(self, segment: Segment) -> int:
        """Bytes that a rank stores for a segment between steps: residual, the average that it
        hands out, kept message."""
        feedback = segment.codec.feedback
        residual = feedback.dtype.itemsize * segment.columns if feedback else 0
        average = 4 * segment.columns if feedback and feedback.rate else 0
        message = 4 * segment.codec.words * self.info.world_size if self.kept else 0
        return self.destinations * residual + average + message


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
    share = param.columns / max(1, segment.columns)
    return Row(
        direction=unit.direction,
        unit=unit.info.name or "(root)",
        param=param.name,
        shape=param.shape,
        role=segment.role,
        codec=segment.codec.name,
        density=segment.codec.density,
        dense_bytes=unit.dense_bytes(param.columns),
        wire_bytes=unit.wire_bytes(segment) * share,
        stored_bytes=unit.stored_bytes(segment) * share,
    )


_MOMENTUM = (
    "feedback 'momentum' hands out a moving average of gradients: set the optimizer's own first "
    "momentum to 0, as with AdamW(betas=(0.0, 0.95)), and tune its learning rate anew"
)

# Where nothing is said about replicas, their gradients must be averaged all the same.
_DENSE = (Rule(when=When(), codec=DenseCodec()),)

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
    segments = [s for units in directions for unit in units for s in unit.segments]
    if any(s.codec.feedback is not None and s.codec.feedback.rate for s in segments):
        notes.append(_MOMENTUM)
    plan = Plan(policy, *directions, notes=tuple(notes))
    _check_effect(plan, matched)
    return plan


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


def _plan_unit(
    unit: UnitInfo,
    rules: Sequence[Rule | ParameterRule],
    direction: Direction,
    matched: set[tuple[Direction, int]],
) -> list[UnitPlan]:
    """The unit's plan, or all that ``codec: auto`` may become, the least compressed first."""
    runs: list[tuple[int | None, str, list[UnitParam]]] = []
    for param in unit.params:
        info = ParamInfo.of(param.name, param.shape)
        index = first_match(rules, info)
        if index is not None:
            matched.add((direction, index))
        if not runs or runs[-1][:2] != (index, info.role):
            runs.append((index, info.role, []))
        runs[-1][2].append(param)

    def with_bits(bits: int) -> UnitPlan:
        segments: list[Segment] = []
        start = 0
        for index, role, params in runs:
            stop = start + sum(p.columns for p in params)
            rule = None if index is None else rules[index]
            segments.append(
                Segment(
                    start=start,
                    stop=stop,
                    params=tuple(params),
                    role=role,
                    rule=index,
                    codec=_plan_segment(rule, unit, stop - start, bits),
                )
            )
            start = stop
        return UnitPlan(info=unit, segments=tuple(segments), direction=direction)

    automatic = any(isinstance(rules[i].codec, AutoCodec) for i, _, _ in runs if i is not None)
    # min_bits makes some of them equal.
    return list(dict.fromkeys(map(with_bits, AUTO_BITS if automatic else AUTO_BITS[:1])))


def _plan_segment(
    rule: Rule | ParameterRule | None, unit: UnitInfo, columns: int, auto_bits: int
) -> CodecPlan:
    codec = DenseCodec() if rule is None else rule.codec
    feedback = rule.feedback if isinstance(rule, Rule) else Feedback(kind="none")
    if isinstance(codec, AutoCodec):
        codec = resolve_auto(codec, auto_bits, parameters=isinstance(rule, ParameterRule))
    return plan_codec(
        codec, feedback, columns=columns, world_size=unit.world_size, dtype=unit.dtype
    )


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
