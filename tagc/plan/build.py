"""Builds the plan of a policy for the units of a model: rules become segments, and ``codec: auto``
the codec that is chosen for a unit. A policy may repeat the choices."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

from tagc.codecs import CodecConfig, CodecPlan, PlanRequest, plan_codec
from tagc.codecs.delta import DeltaConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.feedback import plan_feedback
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig, QuantizedPlan
from tagc.plan.checks import (
    COMPRESSIBLE,
    check_dtype,
    check_effect,
    check_kept,
    matrices_of,
    notes_on,
)
from tagc.plan.param_slices import columns_of
from tagc.plan.plan import Plan
from tagc.plan.sites import about_sites
from tagc.plan.table import as_list
from tagc.plan.two_shots import in_fewest_bytes
from tagc.plan.unit_plan import Direction, MessagePlan, Segment, UnitPlan
from tagc.plan.units import UnitInfo, UnitParam
from tagc.policy import Inside, ParameterRule, Policy, PolicyError, Rule, When, first_match, show
from tagc.policy.rules import AutoConfig, AutoParametersConfig

# Replicas' gradients must be averaged even if the policy has no rules for them.
_DENSE = (Rule(when=When(), codec=DenseConfig()),)


def build_plan(
    units: Sequence[UnitInfo],
    policy: Policy,
    *,
    gathers: Sequence[UnitInfo] = (),
    replicas: Sequence[UnitInfo] = (),
    choose: Choose | None = None,
    gloo: bool = False,
    micro_batches: int = 1,
) -> Plan:
    """Apply a policy to the units of a model.

    Args:
        units: the reduce-scatter of every unit.
        gathers: the all-gather of every unit, which FSDP does itself without rules for parameters.
        replicas: the all-reduce of every unit's shard; needed if the model has replicas.
        choose: resolves ``codec: auto``, given the position of a unit in these lists.
        gloo: whether the backend is gloo, where tagc's two levels are faster than gloo's own sums.
            Other backends know the hosts, and sum units with nothing to compress themselves.
        micro_batches: backwards in an optimizer step.

    Raises:
        PolicyError: if the policy has compressing rules, but compresses nothing here.
    """
    named = {p.name: p for info in (*units, *gathers) for p in info.params}
    policy = policy.for_model(named)
    matched: set[tuple[Direction, int]] = set()
    chosen: dict[tuple[Direction, str], list[str]] = {}
    settled: dict[tuple[str, int], dict[CodecConfig, list[str]]] = {}

    def planned(
        infos: Sequence[UnitInfo], rules: Sequence[Rule | ParameterRule], direction: Direction
    ) -> tuple[UnitPlan, ...]:
        return tuple(one(i, info, rules, direction) for i, info in enumerate(infos) if rules)

    def one(
        i: int, info: UnitInfo, rules: Sequence[Rule | ParameterRule], direction: Direction
    ) -> UnitPlan:
        options = _plan_unit(info, policy, rules, direction, matched)
        if not gloo and info.ranks_per_host > 1 and not options[0][0].compressed:
            options[0] = _plan_unit(info.in_one_level(), policy, rules, direction, matched)[0]
        unit, bits = options[0]
        if len(options) > 1:
            if choose is None:
                raise PolicyError("codec 'auto' needs a measured or a given link to choose by")
            choice = choose(i, [option for option, _ in options])
            chosen.setdefault((direction, choice.why), []).append(info.label)
            unit, bits = options[choice.index]
        for segment in unit.segments:
            index = segment.rule
            if index is not None and isinstance(rules[index].codec, AutoConfig):
                codecs = settled.setdefault((direction, index), {})
                config = _resolved(rules[index], unit.info, bits)
                codecs.setdefault(config, []).extend(param.name for param in segment.params)
        return unit

    directions = (
        planned(units, policy.gradients, "gradients"),
        planned(gathers, policy.parameters, "parameters"),
        planned(replicas, policy.replicas or _DENSE, "replicas"),
    )
    native: list[UnitPlan] = []
    if not policy.parameters:
        native += [_plan_unit(info, policy, (), "parameters", matched)[0][0] for info in gathers]
    notes = [*choose.notes] if choose and chosen else []
    notes += [f"{d} of {as_list(names)}: {why}" for (d, why), names in chosen.items()]
    if chosen:
        notes.append(ABOUT_FREEZING)
    infos = (units, gathers)
    notes += notes_on(directions, infos, policy, named.values())
    notes += [] if policy.sites is None else about_sites(directions[0], policy.sites)
    notes += [] if policy.tuning is None else [policy.tuning.advice]
    plan = Plan(
        policy,
        *directions,
        native=tuple(native),
        micro_batches=micro_batches,
        frozen=frozen(policy, settled) if settled else "",
        notes=tuple(notes),
        gloo=gloo,
    )
    return replace(plan, warnings=tuple(check_effect(plan, matched)))


@dataclass
class _Run:
    """The parameters of one segment; ``kind`` is what they have in common."""

    rule: int | None
    kind: tuple[object, ...]
    params: list[UnitParam] = field(default_factory=list)


def _plan_unit(
    unit: UnitInfo,
    policy: Policy,
    rules: Sequence[Rule | ParameterRule],
    direction: Direction,
    matched: set[tuple[Direction, int]],
) -> list[tuple[UnitPlan, int]]:
    """The unit's plan, or its options with ``codec: auto``, the least compressed first; and the
    bits of each."""
    runs: list[_Run] = []
    for param in unit.params:
        info = policy.describe(param.name, param.shape, unit.dtype_name)
        index = first_match(rules, info)
        if index is not None:
            matched.add((direction, index))
            if param.special is not None and not rules[index].codec.carries(param.special):
                index = None
        if unit.native:
            index = None
        # A block may not mix frozen and trained parameters: see MessageGatherer.
        frozen = param.frozen and index is not None
        # Nor duplicates with parameters that tensor parallelism divides: tensor-parallel ranks
        # would scale the duplicates, or select from them, differently.
        duplicated = param.duplicate is not None and index is not None
        # A codec that selects has a threshold for each segment, and roles differ in scale.
        selects = index is not None and rules[index].codec.selects
        kind = index, frozen, duplicated, info.role if selects and unit.flat is None else None
        # A flat buffer is rearranged anyway, so parameters of one rule need not be adjacent.
        near = runs[-1:] if unit.flat is None else runs
        run = next((r for r in near if r.kind == kind), None)
        if run is None:
            run = _Run(rule=index, kind=kind)
            runs.append(run)
        run.params.append(param)

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
                    rule=run.rule,
                    codec=_plan_segment(rule, unit, run.params, stop - start, bits),
                )
            )
            start = stop
        if any(segment.codec.measured_words for segment in segments):
            segments = [_not_kept(segment, rules) for segment in segments]
        plan = UnitPlan(info=unit, segments=tuple(segments), direction=direction)
        return plan_inside(in_fewest_bytes(plan), policy.inside)

    used = [rules[run.rule].codec for run in runs if run.rule is not None]
    # Without a compressible dtype, `auto` stays dense.
    automatic = unit.dtype in COMPRESSIBLE and any(isinstance(c, AutoConfig) for c in used)
    # With min_bits some of the options are equal.
    options: dict[UnitPlan, int] = {}
    for bits in AUTO_BITS if automatic else AUTO_BITS[:1]:
        options.setdefault(with_bits(bits), bits)
    for option in options:
        check_dtype(option)
        check_kept(option)
    return [*options.items()]


def _not_kept(segment: Segment, rules: Sequence[Rule | ParameterRule]) -> Segment:
    """A segment for which `auto` keeps no messages, beside others whose sizes vary."""
    codec = segment.codec
    chosen = segment.rule is not None and isinstance(rules[segment.rule].codec, AutoConfig)
    if not (chosen and isinstance(codec, QuantizedPlan)):
        return segment
    return replace(segment, codec=replace(codec, keep_for_backward=False))


def _resolved(rule: Rule | ParameterRule, unit: UnitInfo, bits: int) -> CodecConfig:
    if not isinstance(rule.codec, AutoConfig):
        return rule.codec
    owes = isinstance(rule, Rule) and plan_feedback(rule.feedback) is not None
    copy_bytes = unit.dtype.itemsize / unit.ranks_per_host
    return resolve_auto(rule.codec, bits, copy_bytes=copy_bytes, owes=owes)


def _plan_segment(
    rule: Rule | ParameterRule | None,
    unit: UnitInfo,
    params: Sequence[UnitParam],
    columns: int,
    auto_bits: int,
) -> CodecPlan:
    config = DenseConfig() if rule is None else _resolved(rule, unit, auto_bits)
    feedback = plan_feedback(rule.feedback) if isinstance(rule, Rule) else None
    request = PlanRequest(
        columns=columns,
        world_size=unit.world_size // unit.ranks_per_host,
        dtype=unit.dtype,
        feedback=feedback,
        spans=[param.columns for param in params],
        matrices=matrices_of(unit, params, config) if config.needs_matrices else (),
        replicated=unit.replicated,
    )
    try:
        return plan_codec(config, request)
    except ValueError as error:  # such as more ranks than the sum of a symbol can hold
        raise PolicyError(f"{config.description} of {params[0].name}: {error}") from None


CONFIGS_INSIDE: dict[Inside, CodecConfig] = {
    "native": DenseConfig(),
    "bfloat16": DenseConfig(wire="bfloat16"),
    "int8": QuantizedConfig(bits=8, rounding="stochastic"),
}
assert set(CONFIGS_INSIDE) == set(get_args(Inside))


def plan_inside(unit: UnitPlan, inside: Inside) -> UnitPlan:
    """The unit with messages inside hosts, if its ranks add up there and messages send less.

    Segments that a policy compresses between hosts may be sent inside them as bfloat16, or in 8
    bits. Neither has feedback, so no rank keeps a residual for its neighbours. Dense segments are
    summed uncompressed.
    """
    adds_up = unit.direction == "gradients" and unit.info.ranks_per_host > 1
    # bfloat16 saves nothing if gradients have two bytes already.
    fewer = inside == "int8" or (inside == "bfloat16" and unit.info.dtype.itemsize > 2)
    if not (adds_up and fewer and unit.compressed):
        return unit

    def of_host(segment: Segment) -> Segment:
        request = PlanRequest(
            columns=segment.columns,
            world_size=unit.info.ranks_per_host,
            dtype=unit.info.dtype,
            feedback=None,
        )
        config = CONFIGS_INSIDE[inside if segment.compressed else "native"]
        return replace(segment, codec=plan_codec(config, request))

    rows, each = unit.rows, unit.rows // unit.info.ranks_per_host
    segments = tuple(map(of_host, unit.segments))
    message = MessagePlan(segments=segments, made=rows, read=rows, rows=each)
    return replace(unit, inside=message)


AUTO_BITS = (32, 16, 8, 4)
"""The options in bits per element; parameters stop at 8 if no copy may be stored."""
ABOUT_FREEZING = (
    "codec auto measures at every start and may choose differently, which changes losses: "
    'plan().freeze("chosen.yaml") writes this choice, for policy="chosen.yaml"'
)
# 8 bits per element, and a scale of 16 bits for every 256 elements.
_KEPT_BYTES = 1 + 2 / 256


@dataclass(frozen=True, kw_only=True)
class Choice:
    index: int
    why: str


class Choose(Protocol):
    """Resolves ``codec: auto`` for a whole unit: if one segment is compressed, the unit uses
    messages instead of the backend's own collective. ``notes`` are the facts behind the choices."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        """Choose among plans of the unit at ``position``, the least compressed first, on all ranks
        alike."""
        ...


def resolve_auto(config: AutoConfig, bits: int, *, copy_bytes: float, owes: bool) -> CodecConfig:
    """The codec with ``bits`` bits, but at least the rule's ``min_bits``. A copy takes
    ``copy_bytes`` per parameter of the model. Without a residual (``owes``), gradients are rounded
    stochastically."""
    parameters = isinstance(config, AutoParametersConfig)
    bits = max(bits, config.min_bits)
    if bits == 32:
        return DenseConfig()
    if bits == 16:
        return DenseConfig(wire="bfloat16")
    if not parameters:
        rounding = "nearest" if owes else "stochastic"
        return QuantizedConfig(bits=8 if bits == 8 else 4, rounding=rounding)
    if bits == 4 and config.memory and config.memory >= copy_bytes:
        return DeltaConfig(bits=4)
    return QuantizedParametersConfig(bits=8, keep_for_backward=config.memory >= _KEPT_BYTES)


Settled = Mapping[tuple[str, int], Mapping[CodecConfig, Sequence[str]]]
"""The parameters of each codec that ``auto`` became, by direction and index of the rule."""


def frozen(policy: Policy, settled: Settled) -> str:
    """The text of a policy's file that repeats the choices of ``codec: auto``."""
    data: dict[str, Any] = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for direction in ("gradients", "parameters", "replicas"):
        rules = [
            rule
            for i, given in enumerate(data.get(direction) or ())
            for rule in _settled_rules(given, settled.get((direction, i), {}))
        ]
        if rules:
            data[direction] = rules
    return "\n".join(t for t in show(data).splitlines() if not t.lstrip().startswith("#")) + "\n"


def _settled_rules(rule: dict[str, Any], codecs: Mapping[CodecConfig, Sequence[str]]) -> Any:
    """The rule, or one for the parameters of each codec that ``auto`` became."""
    if rule["codec"]["kind"] != "auto":
        yield rule
        return
    # A rule that selects no parameter is dense: nothing was measured for it.
    for config, names in codecs.items() or [(DenseConfig(), ())]:
        kind = type(config).model_fields["kind"].default
        codec = {"kind": kind} | config.model_dump(mode="json", exclude_unset=True)
        one = rule | {"codec": codec}
        if len(codecs) > 1:
            one["when"] = {"name": [glob.escape(name) for name in names]}
        if codec["kind"] == "dense":
            one.pop("feedback", None)
        yield one
