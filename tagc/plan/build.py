"""Builds the plan of a policy for the units of a model: rules become segments, and ``codec: auto``
the codec that is chosen for a unit. A policy may repeat the choices."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

from tagc.codecs import CodecConfig, CodecPlan, PlanRequest, plan_codec
from tagc.codecs.delta import DeltaConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.exact import ExactConfig
from tagc.codecs.feedback import FeedbackConfig, plan_feedback
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig
from tagc.plan.checks import COMPRESSIBLE, check_effect, check_unit, matrices_of, notes_on
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
    policy = policy.for_model(p.name for info in (*units, *gathers) for p in info.params)
    chosen: dict[tuple[Direction, str], list[str]] = {}
    settled: dict[tuple[str, int], dict[CodecConfig, list[str]]] = {}

    def one(i: int, info: UnitInfo, rules: _Rules, direction: Direction) -> UnitPlan:
        options = _plan_unit(info, policy, rules, direction)
        if not gloo and info.ranks_per_host > 1 and not options[0][0].compressed:
            options[0] = _plan_unit(info.in_one_level(), policy, rules, direction)[0]
        unit, configs = options[0]
        if len(options) > 1:
            if choose is None:
                raise PolicyError("codec 'auto' needs a measured or a given link to choose by")
            choice = choose(i, [option for option, _ in options])
            chosen.setdefault((direction, choice.why), []).append(info.label)
            unit, configs = options[choice.index]
        for segment in unit.segments:
            index = segment.rule
            if index is not None and isinstance(rules[index].codec, AutoConfig):
                codecs = settled.setdefault((direction, index), {})
                names = (param.name for param in segment.params)
                codecs.setdefault(configs[index], []).extend(names)
        return unit

    def planned(
        infos: Sequence[UnitInfo], rules: _Rules, direction: Direction
    ) -> tuple[UnitPlan, ...]:
        return tuple(one(i, info, rules, direction) for i, info in enumerate(infos) if rules)

    native = () if policy.parameters else gathers
    plan = Plan(
        policy,
        planned(units, policy.gradients, "gradients"),
        planned(gathers, policy.parameters, "parameters"),
        planned(replicas, policy.replicas or _DENSE, "replicas"),
        native=tuple(_plan_unit(info, policy, (), "parameters")[0][0] for info in native),
        micro_batches=micro_batches,
        frozen=frozen(policy, settled) if settled else "",
        gloo=gloo,
    )
    notes = [*choose.notes] if choose and chosen else []
    notes += [f"{d} of {as_list(names)}: {why}" for (d, why), names in chosen.items()]
    if chosen:
        notes.append(
            "codec auto measures at every start and may choose differently, which changes losses: "
            'plan().freeze("chosen.yaml") writes this choice, for policy="chosen.yaml"'
        )
    notes += notes_on(plan, units, gathers)
    notes += [] if policy.sites is None else about_sites(plan.units, policy.sites)
    notes += [] if policy.tuning is None else [policy.tuning.advice]
    return replace(plan, notes=tuple(notes), warnings=tuple(check_effect(plan)))


_Rules = Sequence[Rule | ParameterRule]
_Configs = dict[int, CodecConfig]
"""The configurations that the codecs of rules became, by the rules' indexes."""


def _plan_unit(
    unit: UnitInfo, policy: Policy, rules: _Rules, direction: Direction
) -> list[tuple[UnitPlan, _Configs]]:
    """The unit's plan, or its options with ``codec: auto``, the least compressed first."""
    # The parameters of each segment, and what they have in common: first the index of their rule.
    runs: list[tuple[tuple[Any, ...], list[UnitParam]]] = []
    for param in unit.params:
        info = policy.describe(param.name, param.shape, unit.dtype_name)
        index = None if unit.native else first_match(rules, info)
        codec = None if index is None else rules[index].codec
        if codec is not None and param.special is not None and not codec.carries(param.special):
            index = codec = None
        kind = (
            index,
            # A block may not mix frozen and trained parameters: see MessageGatherer.
            codec is not None and param.frozen,
            # Nor duplicates with parameters that tensor parallelism divides: tensor-parallel ranks
            # would scale the duplicates, or select from them, differently.
            codec is not None and param.duplicate is not None,
            # A codec that selects has a threshold for each segment, and roles differ in scale.
            info.role if codec is not None and codec.selects and unit.flat is None else None,
        )
        # A flat buffer is rearranged anyway, so parameters of one rule need not be adjacent.
        near = runs[-1:] if unit.flat is None else runs
        params = next((params for other, params in near if other == kind), None)
        if params is None:
            runs.append((kind, [param]))
        else:
            params.append(param)

    codecs = {i: rules[i].codec for (i, *_), _ in runs if i is not None}
    # No backward can read messages again whose sizes vary.
    keeps = not any(isinstance(codec, ExactConfig) for codec in codecs.values())

    def with_bits(bits: int) -> tuple[UnitPlan, _Configs]:
        configs = {i: _resolved(rules[i], unit, bits, keeps=keeps) for i in codecs}
        segments: list[Segment] = []
        start = 0
        for (i, *_), params in runs:
            stop = start + columns_of(unit, params)
            rule = None if i is None else rules[i]
            feedback = rule.feedback if isinstance(rule, Rule) else None
            config = DenseConfig() if i is None else configs[i]
            codec = _plan_segment(config, feedback, unit, params, stop - start)
            segments.append(
                Segment(start=start, stop=stop, params=tuple(params), rule=i, codec=codec)
            )
            start = stop
        plan = UnitPlan(info=unit, segments=tuple(segments), direction=direction)
        return plan_inside(in_fewest_bytes(plan), policy.inside), configs

    # Without a compressible dtype, `auto` stays dense.
    automatic = any(isinstance(codec, AutoConfig) for codec in codecs.values())
    bits = AUTO_BITS if automatic and unit.dtype in COMPRESSIBLE else AUTO_BITS[:1]
    # With min_bits some of the options are equal.
    options: dict[UnitPlan, _Configs] = {}
    for plan, configs in map(with_bits, bits):
        options.setdefault(plan, configs)
    for plan in options:
        check_unit(plan)
    return [*options.items()]


def _plan_segment(
    config: CodecConfig,
    feedback: FeedbackConfig | None,
    unit: UnitInfo,
    params: Sequence[UnitParam],
    columns: int,
) -> CodecPlan:
    request = PlanRequest(
        columns=columns,
        world_size=unit.world_size // unit.ranks_per_host,
        dtype=unit.dtype,
        feedback=None if feedback is None else plan_feedback(feedback),
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

    segments, ranks = [], unit.info.ranks_per_host
    for segment in unit.segments:
        config = CONFIGS_INSIDE[inside if segment.compressed else "native"]
        request = PlanRequest(columns=segment.columns, world_size=ranks, dtype=unit.info.dtype)
        segments.append(replace(segment, codec=plan_codec(config, request)))
    rows, each = unit.rows, unit.rows // ranks
    message = MessagePlan(segments=tuple(segments), made=rows, read=rows, rows=each)
    return replace(unit, inside=message)


AUTO_BITS = (32, 16, 8, 4)
"""The options in bits per element; parameters stop at 8 if no copy may be stored."""
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


def _resolved(rule: Rule | ParameterRule, unit: UnitInfo, bits: int, *, keeps: bool) -> CodecConfig:
    """The rule's codec; of codec ``auto`` the one with ``bits`` bits, but at least ``min_bits``.
    Without feedback, gradients are rounded stochastically. ``keeps``: whether a backward may read
    its forward's messages."""
    config = rule.codec
    if not isinstance(config, AutoConfig):
        return config
    bits = max(bits, config.min_bits)
    if bits == 32:
        return DenseConfig()
    if bits == 16:
        return DenseConfig(wire="bfloat16")
    if isinstance(rule, Rule):
        rounding = "stochastic" if rule.feedback.kind == "none" else "nearest"
        return QuantizedConfig(bits=8 if bits == 8 else 4, rounding=rounding)
    assert isinstance(config, AutoParametersConfig)
    copy_bytes = unit.dtype.itemsize / unit.ranks_per_host
    if bits == 4 and config.memory and config.memory >= copy_bytes:
        return DeltaConfig(bits=4)
    keeps = keeps and config.memory >= _KEPT_BYTES
    return QuantizedParametersConfig(bits=8, keep_for_backward=keeps)


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
