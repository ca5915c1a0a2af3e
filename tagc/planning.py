"""From rules to segments: the plan of a policy for the units of a model, before any step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tagc.codec_plans import MIN_SHARED, CodecPlan, ResolvedCodec, plan_codec
from tagc.matrix import shard_shape
from tagc.pieces import columns_of
from tagc.plan import Direction, Plan, Segment, UnitInfo, UnitParam, UnitPlan
from tagc.plan_table import as_list, format_bytes
from tagc.policy import ParameterRule, ParamInfo, Policy, PolicyError, Rule, When, first_match
from tagc.policy_codecs import (
    AutoCodec,
    DenseCodec,
    Feedback,
    MatrixCodec,
    QuantizedCodec,
    QuantizedParameters,
)

_MOMENTUM = (
    "feedback 'momentum' hands out a moving average of gradients: set the optimizer's own first "
    "momentum to 0, as with AdamW(betas=(0.0, 0.95)), and tune its learning rate anew"
)

_LEAD = (
    "a lead hands out noisier gradients, which an optimizer like Adam answers with smaller steps: "
    "tune the learning rate anew, from twice dense's upwards (docs/quality.md has factors)"
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
    kinds = [s.codec.feedback for s in segments if s.codec.feedback is not None]
    if any(feedback.rate for feedback in kinds):
        notes.append(_MOMENTUM)
    if any(feedback.lead < 1 for feedback in kinds):
        notes.append(_LEAD)
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
