"""Checks of a plan: errors, warnings and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tagc.codecs import CodecConfig
from tagc.codecs.sketch.plan import MIN_SHARED, SketchPlan
from tagc.ops.matrix import shard_shape
from tagc.plan.plan import Plan, why_missed
from tagc.plan.programs import bytes_in_step, bytes_inside
from tagc.plan.table import as_list, format_bytes
from tagc.plan.two_shots import why_one_shot
from tagc.plan.unit_plan import Segment, UnitPlan
from tagc.plan.units import UnitInfo, UnitParam
from tagc.policy import (
    Inside,
    ParameterRule,
    ParamInfo,
    Policy,
    PolicyError,
    Rule,
    When,
    first_match,
    nearest_miss,
    with_smaller,
)
from tagc.policy.rules import SMALL, AutoConfig, Miss, Near

COMPRESSIBLE = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that messages can carry."""


def notes_on(plan: Plan, units: Sequence[UnitInfo], gathers: Sequence[UnitInfo]) -> Iterator[str]:
    """What users should know about a plan for these reduce-scatters and all-gathers."""
    policy = plan.policy
    yield from _unshared_supports(plan.units, policy.gradients)  # rules for replicas share none
    yield from _in_levels(plan.units)
    yield from _in_levels(plan.parameters)
    yield from _without_effect(plan.units, policy.inside)
    yield from _about_shots(plan.units)
    yield from _about_shots(plan.replicas)
    yield from _left_out(plan.parameters, policy)
    yield from _kept_anyway(plan.parameters)
    if policy.parameters and any(unit.replicated for unit in units):
        yield (
            "the policy's rules for parameters have nothing to do: with DDP each rank has all "
            "parameters, and none are sent"
        )
    yield from _in_one_level(units, plan.units)
    yield from _in_one_level(gathers, plan.parameters)
    yield from _kept_native(plan.parameters)
    yield from _without_role({p.name: p for u in (*units, *gathers) for p in u.params}, policy)
    yield from _beyond_their_names(plan.all_units)
    feedbacks = [segment.codec.feedback for unit in plan.all_units for segment in unit.segments]
    yield from dict.fromkeys(f.note for f in feedbacks if f is not None and f.note)


def _by_reason(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Each reason, and a list of the names that have it."""
    names: dict[str, list[str]] = {}
    for why, name in pairs:
        names.setdefault(why, []).append(name)
    return ((why, as_list(some)) for why, some in names.items())


def _params(units: Iterable[UnitPlan]) -> Iterator[tuple[UnitPlan, Segment, UnitParam]]:
    """All parameters, with their units and segments."""
    return ((unit, s, param) for unit in units for s in unit.segments for param in s.params)


def _unshared_supports(units: Sequence[UnitPlan], rules: Sequence[Rule]) -> Iterator[str]:
    """Parameters without a shared support, although their rule asks for one."""
    names = [
        param.name
        for _, segment, param in _params(units)
        if segment.rule is not None and rules[segment.rule].codec.shares_support
        if isinstance(segment.codec, SketchPlan) and not segment.codec.shared
    ]
    if names:
        replicated = units[0].info.replicated
        why = "no rank owns a shard" if replicated else f"fewer than {MIN_SHARED} groups to keep"
        yield (
            f"gradients of {as_list(names)}: {why}, so every rank keeps its own groups instead of "
            "shared ones"
        )


def _in_levels(units: Sequence[UnitPlan]) -> Iterator[str]:
    """How many units of one direction use two levels, and the bytes inside hosts."""
    layouts = {(u.peers, u.info.ranks_per_host) for u in units if u.info.ranks_per_host > 1}
    for hosts, ranks in sorted(layouts):
        mine = [u for u in units if (u.peers, u.info.ranks_per_host) == (hosts, ranks)]
        inside = format_bytes(sum(map(bytes_inside, mine)))
        what, others = f"{mine[0].direction} of {len(mine)} units in two levels", hosts - 1
        if mine[0].direction == "gradients":
            segments = [s for u in mine if u.inside is not None for s in u.inside.segments]
            forms = dict.fromkeys(s.codec.name for s in segments if s.compressed)
            form = f" as {' and '.join(forms)}" if forms else ""
            yield (
                f"{what}: the {ranks} ranks of a host add up first (each sends {inside} to the "
                f"others in a backward{form}), then a rank sends to one on each of the {others} "
                "other hosts, which is what the table counts"
            )
        else:
            yield (
                f"{what}: a rank sends to one on each of the {others} other hosts, which is what "
                f"the table counts, and the {ranks} ranks of a host forward it to each other (each "
                f"sends {inside} in a step)"
            )


def _without_effect(units: Sequence[UnitPlan], inside: Inside) -> Iterator[str]:
    """The policy asks for fewer bits inside hosts, but no unit sends fewer."""
    if inside == "native" or any(unit.inside is not None for unit in units):
        return
    if not any(unit.compressed for unit in units):
        why = "no gradient is compressed between hosts"
    elif any(unit.info.ranks_per_host > 1 for unit in units):
        why = "the gradients that it compresses have two bytes already"
    else:
        why = "every rank sends for itself"
    yield f"the policy's key 'inside: {inside}' changes nothing here: {why}"


def _in_one_level(infos: Sequence[UnitInfo], units: Sequence[UnitPlan]) -> Iterator[str]:
    """Units of one direction that do not use two levels although others could."""
    pairs = zip(infos, units, strict=False)  # without rules for a direction it has no plans
    names = [u.info.label for i, u in pairs if u.info.ranks_per_host < i.ranks_per_host]
    if names:
        yield (
            f"{units[0].direction} of {as_list(names)}: nothing is compressed, so the backend "
            "sends these units among all ranks at once, as without tagc"
        )


def _about_shots(units: Sequence[UnitPlan]) -> Iterator[str]:
    """The units all-reduced in two shots, and the reasons for one shot."""
    two = [unit for unit in units if unit.shots is not None]
    if two:
        shots = sum(sum(bytes_in_step(unit)) for unit in two)
        once = sum(sum(bytes_in_step(replace(unit, shots=None))) for unit in two)
        yield (
            f"{two[0].direction} of {len(two)} units in two shots: each of the "
            f"{two[0].peers} replicas adds up a slice and sends the sum to all "
            f"({format_bytes(shots)}; in one shot, every message to all, "
            f"{format_bytes(once)})"
        )
    whole = (
        (why_one_shot(unit) or "two would send more", unit.info.label)
        for unit in units
        if unit.all_reduced and unit.compressed and unit.shots is None and unit.peers > 2
    )
    for why, names in _by_reason(whole):
        yield f"{units[0].direction} of {names} in one shot, every message to all: {why}"


def _left_out(units: Sequence[UnitPlan], policy: Policy) -> Iterator[str]:
    """Frozen parameters that are gathered uncompressed despite their rule, and why."""
    special = (
        (param.special.value, param.name)
        for unit, segment, param in _params(units)
        if segment.rule is None and param.special is not None
        if first_match(policy.parameters, _described(policy, unit, param)) is not None
    )
    for what, names in _by_reason(special):
        yield (
            f"parameters {names}: gathered as they are, whatever their rule says, since they are "
            f"frozen and hold {what}, which few bits would change"
        )


def _kept_anyway(units: Sequence[UnitPlan]) -> Iterator[str]:
    """Parameters that are in a copy although their rule asks for none."""
    names = [
        param.name
        for unit, segment, param in _params(units)
        if unit.keeps_copy and segment.codec.measured_words and not segment.codec.of_changes
    ]
    if names:
        yield (
            f"parameters {as_list(names)}: 'keep_copy: false' saves no memory here, since a unit "
            "that keeps a copy of any of its parameters keeps one of all; with 'keep_copy: true' "
            "they take fewer bits"
        )


def _kept_native(units: Sequence[UnitPlan]) -> Iterator[str]:
    """Units that FSDP sends itself despite their rules, and why."""
    native = ((unit.info.native, unit.info.label) for unit in units if unit.info.native)
    for why, names in _by_reason(native):
        yield (
            f"{units[0].direction} of {names}: as FSDP sends them, since {why} (the table counts "
            "their elements in the dtype that FSDP computes with)"
        )


def _without_role(params: Mapping[str, UnitParam], policy: Policy) -> Iterator[str]:
    """Matrices whose names tell no role, if the policy's rules ask for roles."""
    rules = (*policy.gradients, *policy.parameters, *policy.replicas)
    if not any(rule.when.role for rule in rules):
        return
    infos = [policy.describe(name, param.shape) for name, param in params.items()]
    names = [i.name for i in infos if i.role == "other" and not i.no_matrix and i.numel >= SMALL]
    if names:
        what = "1 matrix has" if len(names) == 1 else f"{len(names)} matrices have"
        yield (
            f"{what} role other, as names tell no more: {as_list(names)}; to name their roles, "
            "write `roles` in a policy that extends this one"
        )


def _beyond_their_names(units: Sequence[UnitPlan]) -> Iterator[str]:
    """Parameters that take more than twice their codec's nominal bits."""
    costly = (
        (f"{unit.direction} in {segment.codec.name}", f"{param.name} ({bits:.3g} bits)")
        for unit in units
        for segment in unit.compressed
        for param, own, share in unit.shares(segment)
        if segment.codec.nominal_bits is not None and own
        if (bits := 32 * segment.codec.words * share / own) > 2 * segment.codec.nominal_bits
    )
    for what, names in _by_reason(costly):
        yield (
            f"{what}, scales included, take more than twice the bits of their codes: {names}. The "
            "parts of a shard are too small or too narrow; give such parameters codec 'quantized', "
            "or leave them dense"
        )


def check_effect(plan: Plan) -> list[str]:
    """Warnings about a plan.

    Raises:
        PolicyError: if the policy has compressing rules, but compresses nothing here.
    """
    policy, found = plan.policy, []
    directions = ["gradients", "parameters", "replicas"]
    if any(unit.info.replicated for unit in plan.units):
        directions.remove("parameters")
    lists = {direction: getattr(policy, direction) for direction in directions}
    rules = [(d, i, rule) for d, some in lists.items() for i, rule in enumerate(some)]
    matched = {(d, first_match(lists[d], info)) for d in lists for _, info in _infos(plan, d)}
    compressing = [(d, i) for d, i, rule in rules if rule.codec.compresses]
    # What a policy sends as bfloat16 is the rest, if it has other rules.
    chief = [(d, i) for d, i, rule in rules if rule.codec.compresses and rule.codec.kind != "dense"]
    means_to = chief or compressing
    automatic = any(isinstance(rule.codec, AutoConfig) for _, _, rule in rules)
    selected = {
        (unit.direction, s.rule) for unit in plan.all_units for s in unit.segments if s.compressed
    }
    if means_to and not {*means_to} & (matched if automatic else selected):
        rest = "" if means_to == compressing else "to send all as bfloat16, keep only that rule; "
        text, file = _reasons(plan, means_to)
        raise PolicyError(
            f"policy {policy.name!r} compresses nothing in this model: none of its rules "
            f"({', '.join(f'{d}[{i}]' for d, i in means_to)}) selects any of the "
            f"{text}; {rest}to compress nothing, use policy 'dense'{file}"
        )
    for direction, i, rule in rules:
        meant = rule.when != When() and not policy.inherits(direction, i)
        if meant and (direction, i) not in matched and not _for_others(plan, direction, i):
            found.append(
                f"policy {policy.name!r}: rule {direction}[{i}] matches no parameter of this "
                f"model{_nearest(plan, direction, rule)}"
            )
    dense, wire = (sum(getattr(r, n) for r in plan.rows) for n in ("dense_bytes", "wire_bytes"))
    alone = all(unit.info.world_size == 1 for unit in (*plan.units, *plan.parameters))
    if means_to and plan.replicas and alone and not policy.replicas:
        found.append(
            f"policy {policy.name!r} sends nothing compressed: each replica is sharded over a "
            "single rank, so all that is sent is the all-reduce over replicas. Write rules under "
            "`replicas`"
        )
    elif means_to and not automatic and wire >= dense > 0:
        found.append(
            f"policy {policy.name!r} sends {format_bytes(wire)} per step at this number of ranks, "
            f"dense {format_bytes(dense)}: do not compress here, or ask for a lower density"
        )
    return [*found, *_mostly_small(plan)]


def _described(policy: Policy, unit: UnitPlan, param: UnitParam) -> ParamInfo:
    return policy.describe(param.name, param.shape, unit.info.dtype_name)


def _infos(plan: Plan, direction: str) -> list[tuple[UnitParam, ParamInfo]]:
    """All parameters of a direction, and what rules ask of them."""
    units = (unit for unit in plan.all_units if unit.direction == direction)
    return [(param, _described(plan.policy, unit, param)) for unit, _, param in _params(units)]


def _for_others(plan: Plan, direction: str, index: int) -> bool:
    """Whether a rule would select a parameter if that was sent in another dtype."""
    rules = getattr(plan.policy, direction)
    # The last one stands for all that no rule names.
    dtypes = {dtype for rule in rules for dtype in rule.when.dtype or ()} | {""}
    others = (replace(info, dtype=d) for _, info in _infos(plan, direction) for d in dtypes)
    return any(first_match(rules, info) == index for info in others)


def _nearest(plan: Plan, direction: str, rule: Rule | ParameterRule) -> str:
    """Why a rule has no parameters: rules before it take them; or the parameter that it comes
    nearest to, if it selects all but its size or kind."""
    infos = [info for _, info in _infos(plan, direction)]
    for info in infos:
        if rule.miss(info) is None:
            taker = first_match(getattr(plan.policy, direction), info)
            return f": an earlier rule, {direction}[{taker}], takes {info.name}"
    misses = [(miss, info) for info in infos if (miss := rule.miss(info)) is not None]
    if not misses:
        return ""
    near, info = max(misses, key=lambda pair: (pair[0].near, pair[1].numel))
    return f"; nearest is {info.name}: {near.why}" if near.near >= Near.SIZE else ""


def _to_select(
    policy: Policy, small: Sequence[ParamInfo], directions: Sequence[str]
) -> tuple[str, str]:
    """What to write to compress these parameters, which are too small for a rule (the smallest
    decides), and the whole file; empty if the policy has no name to extend."""
    numel = min(info.numel for info in small)
    of = f" for {directions[0]}" if len(directions) == 1 else ""
    text = f"write `min_numel: {numel}` under `when` in a rule{of}"
    rules = [(d, i, rule) for d in directions for i, rule in enumerate(getattr(policy, d))]
    for direction, i, rule in rules:
        misses = [rule.miss(info) for info in small]
        if rule.codec.compresses and any(m and m.near == Near.SMALL for m in misses):
            file = with_smaller(policy, direction, i, numel)
            if file:
                return f"{text}, as in the file below", f":\n{file}"
    return text, ""


def _mostly_small(plan: Plan) -> Iterator[str]:
    """A warning if the gradients of most trained elements stay dense only because their parameters
    are smaller than the default ``min_numel``. A model's adapters (LoRA) are like that."""
    policy, infos = plan.policy, [info for _, info in _infos(plan, "gradients")]
    small = [
        info
        for info in infos
        if first_match(policy.gradients, info) is None
        if nearest_miss(policy.gradients, info).near == Near.SMALL
    ]
    left, total = (sum(info.numel for info in some) for some in (small, infos))
    if 2 * left > total:
        text, file = _to_select(policy, small, ["gradients"])
        yield (
            f"policy {policy.name!r} leaves the gradients of {left / total:.0%} of the trained "
            f"elements dense, in parameters with fewer than {SMALL:,} elements: "
            f"{as_list([info.name for info in small])}. To compress them, {text}{file}"
        )


def _reasons(plan: Plan, means_to: Sequence[tuple[str, int]]) -> tuple[str, str]:
    """How many parameters none of these rules selects, why, and what to write to select them; and
    the whole file, if it is one."""
    by_miss: dict[Miss, dict[str, ParamInfo]] = {}
    directions = [*dict.fromkeys(direction for direction, _ in means_to)]
    for direction in directions:
        rules = [getattr(plan.policy, d)[i] for d, i in means_to if d == direction]
        for param, info in _infos(plan, direction):
            by_miss.setdefault(why_missed(param, rules, info), {})[info.name] = info
    found = {miss: list(infos.values()) for miss, infos in by_miss.items()}
    if not found:
        return "0 parameters that are trained", ""
    count = len({info.name for infos in found.values() for info in infos})
    # Begin with the parameters that a rule came nearest to: they need the smallest change.
    listed = sorted(found.items(), key=lambda item: (-item[0].near, -item[1][0].numel))
    reasons = [
        f"{infos[0].name} ({infos[0].role}{f', and {len(infos) - 1} more' * (len(infos) > 1)}): "
        f"{miss.why}"
        for miss, infos in listed[:4]
    ]
    more = f"; and {len(listed) - 4} more reasons" if len(listed) > 4 else ""
    text = f"{count} parameters. {'; '.join(reasons)}{more}"
    miss, infos = listed[0]
    if miss.near == Near.SMALL:
        small = [info for m, some in found.items() if m.near == Near.SMALL for info in some]
        how, file = _to_select(plan.policy, small, directions)
        return f"{text}. To compress these, {how}", file
    elif miss.near == Near.NO_MATRIX:
        text += f". To compress such, write `name: {infos[0].name}` under `when` in a rule"
    elif miss.near == Near.ROLE:
        text += ". If a role is wrong, name these parameters under `roles` in a policy that extends"
        text += " this one"
    return text, ""


def check_unit(unit: UnitPlan) -> None:
    """Raise PolicyError for dtypes that no codec can compress, and if messages that a backward
    reads again may have several sizes."""
    # FSDP gathers several dtypes as bytes; `tagc.wrap` raises a clearer error for that.
    if unit.compressed and unit.info.dtype not in (*COMPRESSIBLE, torch.uint8):
        what, remedy = {
            True: ("gathers parameters", "param_dtype"),
            False: ("reduces gradients", "reduce_dtype"),
        }[unit.direction == "parameters"]
        policy = "MixedPrecisionPolicy" if unit.info.flat is None else "MixedPrecision"
        remedy = f"give it a {policy}({remedy}=torch.float32)"
        if unit.info.replicated:
            remedy = "make its parameters float32 before DistributedDataParallel(...)"
        names = as_list([p.name for s in unit.compressed for p in s.params])
        raise PolicyError(
            f"unit {unit.info.label!r} {what} of {unit.info.dtype}, which only the "
            f"codec 'dense' can send; {remedy}, or leave out of the policy: {names}"
        )
    varying = [p.name for s in unit.segments if s.codec.measured_words for p in s.params]
    if unit.reuses_forward_message and varying:
        raise PolicyError(
            f"unit {unit.info.label!r} has parameters with 'keep_for_backward', and with codec "
            f"'exact' and 'keep_copy: false': {as_list(varying)}. The sizes of its messages vary, "
            "and a backward gathers them again: set 'keep_for_backward: false' or 'keep_copy: true'"
        )


def matrices_of(
    unit: UnitInfo, params: Sequence[UnitParam], codec: CodecConfig
) -> list[list[tuple[int, int]]]:
    """The rows and columns of the matrices in a shard of each parameter, for ``codec``. Raises
    PolicyError if a parameter's shard is not a matrix."""
    if unit.flat is not None:
        raise PolicyError(
            f"unit {unit.label!r} is sharded by FSDP1, which cuts through rows, so "
            "codec 'matrix' has none to scale; use fully_shard (FSDP2), or codec 'quantized'"
        )
    vectors = [p.name for p in params if len(p.shape) < 2]
    if vectors:
        raise PolicyError(
            f"{codec.description} needs rows and columns, but unit {unit.label!r} has "
            f"{as_list(vectors)} with one dimension only; give such parameters "
            f"{codec.for_vectors}"
        )
    return [_matrices(param) for param in params]


def _matrices(param: UnitParam) -> list[tuple[int, int]]:
    """One matrix for the whole shard, or one for each of stacked matrices (experts ``[E, d, f]``),
    whichever has fewer scales."""
    if param.local is None:
        return [shard_shape(param.shape, param.dim, param.columns)]
    whole = shard_shape(param.local, 0, param.columns)
    if len(param.local) == 3:
        stacked, rows, columns = param.local
        if stacked * (rows + columns) < sum(whole):
            return [(rows, columns)] * stacked
    return [whole]
