"""``tagc.wrap``: plans, makes and installs the collectives that replace FSDP's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tagc.attach import (
    Levels,
    ShardValues,
    Unit,
    integration_of,
    look_at_frozen,
    sharding_groups,
    with_specials,
)
from tagc.basics.progress import say
from tagc.basics.switch import DISABLE, is_disabled
from tagc.basics.version import __version__
from tagc.basics.warn import warn
from tagc.collect import (
    Hosts,
    RankOnHost,
    agree_on,
    check_backends,
    check_hosts,
    gather_by_rank,
    gather_merged,
)
from tagc.costs.auto import FastestChoice, is_automatic, measured_choice
from tagc.groups.forward import watch_forward
from tagc.groups.mesh import check_meshes
from tagc.handle.collectives import (
    Collectives,
    average_natively,
    install,
    make_collectives,
    on_gloo,
    over_replicas,
    with_kernels,
)
from tagc.handle.compressor import Compressor, attach, attached
from tagc.plan import Choose, Plan, build_plan, format_bytes, times_less, total
from tagc.plan.unit_plan import MESSAGE_FORMAT
from tagc.policy import Policy, PolicyError

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy | None = None,
    *,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    hosts: Hosts = "auto",
    ops: str | None = None,
) -> Model:
    """Compress the FSDP or DDP traffic that ``policy`` selects.

    Call it once, on every rank, after ``fully_shard`` or ``DistributedDataParallel(...)`` and
    before the first backward. It gathers a few hundred bytes from each rank to check that all ranks
    agree. If the policy compresses
    parameters, it gathers as many more for a handful of frozen parameters. A policy with
    ``codec: auto`` also measures the link, for a second or two.

    With the environment variable ``TAGC_DISABLE=1`` (on all ranks) it only checks and compresses
    nothing: training has the bits of native FSDP or DDP. A loaded state is kept and saved again
    unchanged.

    With FSDP1, tagc compresses gradients through FSDP1's communication hook, but not parameters. A
    segment then has as many columns as the shard with most of its elements, so a policy with
    several rules may send more than with FSDP2. The plan says how much. With DDP, tagc compresses
    gradients through DDP's communication hook, by the rules for ``gradients``.

    Args:
        model: a model to which ``fully_shard`` was applied, the outermost
            ``FullyShardedDataParallel``, or a ``DistributedDataParallel``, on its device; changed
            in place.
        policy: name of a built-in policy (``tagc.policies()``), path of a YAML file, mapping, or
            :class:`tagc.Policy`. By default the policy in the environment variable ``TAGC_POLICY``
            (the same on all ranks), else ``auto``: the fastest on the measured link, of 4 bits and
            more. On a fast link that is dense. With FSDP1 the policy may have no rules for
            parameters, because FSDP1 gathers them itself.
        replicas: the ranks that hold the same shard in other replicas of the sharded model, as a
            1-D mesh or a group. Shard the model over ``mesh["shard"]`` only; tagc averages
            gradients over ``mesh["replicate"]`` by the policy's rules for ``replicas``. FSDP2 only.
        hosts: whether the ranks of a host add up their gradients first. This divides the bytes that
            leave the host, and the residuals that a rank stores, by the number of ranks on a host.
            These ranks also pass compressed parameters on to each other. ``"auto"``: if the ranks
            of a unit are on at least two hosts, in equal blocks of neighbours (``plan()`` says so);
            an integer: that many neighbours share a host (or a rack, or a site); None: every rank
            sends for itself. Not with FSDP1. With several ranks on a host,
            ``model.set_requires_all_reduce(False)`` keeps a micro-batch's gradient inside the host.
        ops: implementation, see :func:`tagc.ops.get_ops`. GPU kernels are compiled here: this takes
            seconds the first time, and is then cached. They then run on small inputs and are
            compared with the reference on the CPU, bit for bit. CPU kernels are compiled, and
            cached, by the first step that needs them.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not sharded, is already wrapped (as a whole or in part), or has
            its own communication hook; if ``hosts`` does not fit its ranks; or if its process group
            is a stand-in that sends nothing.
        tagc.PolicyError: if the policy is not valid, compresses nothing in this model, or needs
            something that FSDP1 cannot do.
        tagc.KernelError: if the results of the GPU kernels differ from the reference's on a device.
        RuntimeError: if the ranks disagree, or wrapping failed on another rank. (A rank whose model
            is not sharded has no process group to report that; the others then wait for their
            group's timeout.)
    """
    given: Any = replicas
    if isinstance(replicas, DeviceMesh) and replicas.ndim == 1:
        given = replicas.get_group()
    # Not the group of all ranks: with pipeline stages only some of them may have units to wrap.
    groups = sharding_groups(model)
    if isinstance(given, dist.ProcessGroup):
        groups.append(given)
    check_backends(groups)

    request = _Request(model, policy, given, hosts)
    request.agree(groups)
    disabled, loaded = request.disabled, request.policy
    replica_group = given or request.units[0].replicas
    asks = hosts is not None or loaded.parameters
    where = gather_by_rank(groups, {dist.get_rank(): request.place}) if asks else {}
    seen = gather_merged(groups, request.frozen, ShardValues.merged) if asks else {}
    units = with_specials(request.units, seen)
    levels = agree_on(groups, {"hosts": lambda: (Levels(units, hosts, where), "")})["hosts"]
    # If compression is disabled, no kernels run, so none must be compiled.
    made_with = "reference" if disabled else ops
    alone = all(u.info.world_size == 1 for u in units) and replica_group is None

    def planned(choose: Choose | None) -> Plan:
        plan = build_plan(
            [levels.info(unit) for unit in units],
            loaded,
            gathers=[info for unit in units if (info := levels.gather_info(unit)) is not None],
            replicas=[] if replica_group is None else over_replicas(units, replica_group),
            choose=choose,
            gloo=on_gloo(units),
        )
        return replace(plan, notes=(*plan.notes, *levels.notes))

    def make() -> tuple[tuple[Plan, Collectives], str]:
        plan = planned(choose)
        if not disabled and not alone:
            plan = with_kernels(units, plan, ops)
        made = make_collectives(units, plan, levels, made_with, replica_group)
        return (plan, made), plan.fingerprint[:12]

    try:
        rules = (*loaded.gradients, *loaded.parameters)
        if not disabled and (any(rule.codec.compresses for rule in rules) or on_gloo(units)):
            levels.open()
        choose = None
        if is_automatic(loaded):
            choose = measured_choice(
                [(unit.group, unit.device) for unit in units],
                ops,
                planned,
                replicas=replica_group,
                hosts=[levels.groups(unit) for unit in units],
            )
        # Where plans differ, the names of a unit's parameters say why.
        steps: dict[str, Callable[[], tuple[Any, str]]] = {
            f"unit {i}": lambda info=unit.info: (
                None,
                f"{info.label!r} of {', '.join(param.name for param in info.params)}",
            )
            for i, unit in enumerate(units)
        }
        plan, collectives = agree_on(groups, steps | {"plan": make})["plan"]
        plans = [plans for plans in (plan.units, plan.parameters) if plans]
        pairs = [pair for some in plans for pair in zip(units, some, strict=True)]
        levels.keep(unit for unit, of_unit in pairs if of_unit.info.ranks_per_host > 1)
        if alone:
            collectives.clear()
        if not disabled:
            install(collectives)
            collectives.watch(model)
        elif given is not None:
            average_natively(collectives)
    except BaseException:
        levels.release()
        raise
    for warning in plan.warnings:
        warn(warning)
    if not alone and not disabled and dist.get_rank() == 0:
        say(_summary(plan, choose))
    if alone and not loaded.dimensions:
        warn("tagc.wrap does nothing at world size 1: FSDP skips the reduce-scatter")
    if disabled:
        warn(f"{DISABLE}=1: tagc compresses nothing; unset it to compress")
    if loaded.dimensions:
        collectives.unwatch = watch_forward(model)
    attach(model, Compressor(model, plan, collectives, groups, disabled=disabled))
    return model


@dataclass
class _Request:
    """The request of one rank, which all ranks must agree on before any of them measures or plans:
    a collective that only some ranks call hangs. Every step may read what those before it found."""

    model: nn.Module
    given_policy: str | os.PathLike[str] | Mapping[str, Any] | Policy | None
    given: Any  # the group of replicas that the caller passed, or None
    hosts: Hosts
    disabled: bool = False
    units: list[Unit] = field(default_factory=list)

    def agree(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Take all steps, or raise on all ranks."""
        steps = {
            "version": lambda: f"{__version__}, messages in format {MESSAGE_FORMAT}",
            "hosts": self._find_host,
            "switch": self._look_at_switch,
            "model": self._find_units,
            "policy": self._load_policy,
            "frozen parameters": self._look_at_frozen,
        }
        agree_on(groups, {name: lambda step=step: (None, step()) for name, step in steps.items()})

    def _find_host(self) -> str:
        check_hosts(self.hosts)
        self.place = RankOnHost.mine(len(set(sharding_groups(self.model))))
        return repr(self.hosts)

    def _look_at_switch(self) -> str:
        self.disabled = is_disabled()
        return f"{DISABLE}={int(self.disabled)}"

    def _find_units(self) -> str:
        if not isinstance(self.given, dist.ProcessGroup | None):
            raise ValueError(
                f"replicas=... has type {type(self.given).__name__}; give the dimension of the "
                "mesh that connects the replicas, or its group"
            )
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "tagc.wrap was called in torch.inference_mode(), where it would make tensors that "
                "training cannot write to; call it outside"
            )
        if attached(self.model) is not None:
            raise ValueError(
                "this model is already wrapped; call tagc.compressor(model).remove() first to "
                "wrap it with another policy"
            )
        self._integration = integration_of(self.model)
        self.units = self._integration.find_units(self.model)
        if self.given is not None and any(unit.replicas is not None for unit in self.units):
            raise ValueError(
                "the model is sharded over a mesh with a replicated dimension (HSDP), over which "
                "tagc averages: leave replicas out of tagc.wrap"
            )
        native = {id(unit.replicas): unit for unit in self.units}
        if len(native) > 1:
            one, other = (unit.info.label for unit in list(native.values())[:2])
            raise ValueError(
                f"units {one!r} and {other!r} are replicated over different ranks (HSDP); give "
                "fully_shard the same mesh for all of them, or wrap parts of the model separately"
            )
        return self._integration.name

    def _load_policy(self) -> str:
        self.policy = loaded = Policy.load(self.given_policy)
        replicated = self.given is not None or self.units[0].replicas is not None
        self._integration.check_policy(loaded, replicated)
        if loaded.sites is not None:
            raise PolicyError(
                f"policy {loaded.name!r} is for sites: call tagc.sites(model, optimizer, policy), "
                "and give tagc.wrap a policy without the section sites"
            )
        check_meshes(self.model, loaded)
        replicas = set() if self.given is None else set(dist.get_process_group_ranks(self.given))
        for unit in self.units:
            shared = replicas & set(dist.get_process_group_ranks(unit.group))
            if not unit.info.replicated and len(shared) > 1:  # averaged, shards would be mixed up
                raise ValueError(
                    f"unit {unit.info.label!r} is sharded over ranks that replicas=... says are "
                    "replicas of each other: fully_shard over the sharded dimension of the mesh "
                    "only"
                )
        if loaded.replicas and not replicated:
            raise PolicyError(
                f"policy {loaded.name!r} has rules for replicas: pass tagc.wrap(..., "
                'replicas=mesh["replicate"]), or choose a policy without them'
            )
        return f"{loaded.name} ({loaded.hash[:12]})"

    def _look_at_frozen(self) -> str:
        self.frozen = look_at_frozen(self.units) if self.policy.parameters else {}
        return ""


def _summary(plan: Plan, choose: FastestChoice | None) -> str:
    """One line for users: the policy, with what it measured and chose, what a step sends, and where
    to read more."""
    wire, dense = total(plan.sent)
    text = f"policy {plan.policy.name!r}"
    if choose is not None and plan.frozen:
        codecs: dict[str, dict[str, None]] = {}
        for unit in plan.all_units:
            names = [s.codec.name for s in unit.segments if s.rule is not None]
            codecs.setdefault(unit.direction, {}).update(dict.fromkeys(names))
        chose = [f"{' and '.join(names)} for {of}" for of, names in codecs.items() if names]
        measured = [note.partition(",")[0] for note in choose.notes if note.startswith("measured ")]
        text += f" chose {', '.join(chose)} ({''.join(measured[:1])}"
        text += "; plan().freeze(file) keeps the choice)"
    text += (
        f": a rank sends {format_bytes(wire)} per step instead of {format_bytes(dense)}, "
        f"{times_less((wire, dense))} less, and needs {format_bytes(plan.memory.peak)} of memory"
    )
    tuning = plan.policy.tuning
    if tuning is not None and tuning.asks:
        text += f"; {tuning.advice}"
    return f"{text}; details: tagc.compressor(model).plan()"
