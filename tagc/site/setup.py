"""``tagc.sites``: trains a model in several sites that exchange changes of parameters."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tagc.attach import ddp, distinct, sharding_groups
from tagc.attach.ddp import DDP
from tagc.attach.fsdp2 import FSDP2
from tagc.attach.integrations import INTEGRATIONS, integration_of
from tagc.attach.torchft import TorchftSites, is_manager
from tagc.attach.unit import Unit, ranks_of
from tagc.attach.whole import Named, info_of_set, parameter_sets, whole_on_hosts
from tagc.basics.switch import DISABLE, is_disabled
from tagc.basics.version import __version__
from tagc.basics.warn import warn
from tagc.collect import SilentGroup, Transport, agree_on, check_backends, gather_by_rank
from tagc.collect.transport import backend_of, timeout_of
from tagc.handle.collectives import on_gloo, with_kernels
from tagc.handle.compressor import attached
from tagc.plan import Plan, as_list, between_sites, build_plan
from tagc.plan.unit_plan import MESSAGE_FORMAT
from tagc.policy import Policy, PolicyError
from tagc.policy.roles import plain_name
from tagc.site.anchor import Anchor, SiteUnit, check_trainable
from tagc.site.exchange import SiteExchange
from tagc.site.handle import Sites, sites_of

_VERSION = f"{__version__}, messages in format {MESSAGE_FORMAT}"


def sites(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "sites",
    *,
    sites: DeviceMesh | dist.ProcessGroup | Any = None,
    ops: str | None = None,
) -> Sites:
    """Train a model in several sites that exchange changes of parameters once in many steps.

    Each site trains the whole model on its own data: sharded by ``fully_shard``, in a
    ``DistributedDataParallel``, or on one device. After every ``every`` steps of the optimizer, the
    changes since the last exchange are averaged over the sites, by the codecs and the error
    feedback of the policy's rules for ``gradients``. An outer optimizer applies the average (SGD
    with Nesterov momentum, as in DiLoCo), and all sites go on from there. The policy's section
    ``sites`` says when, in how many fragments, and whether training goes on meanwhile.

    Call it once, on every rank of every site, after the optimizer was made. All sites must have the
    same parameters then, or load the same before the first step. If all load the same later, by
    ``load_state_dict``, they go on from there. Inside a site, gradients may be compressed by
    ``tagc.wrap``.

    Args:
        model: the model as it is held inside a site.
        optimizer: the optimizer of the model's parameters, or several that step one after another.
            The last one counts the steps.
        policy: name of a built-in policy, path of a YAML file, mapping, or :class:`tagc.Policy`,
            with a section ``sites``.
        sites: this rank's counterparts in all sites, with the same shard: a 1-D mesh or a group. By
            default all ranks, if every site is one device. A ``torchft.Manager`` of each rank, if
            sites come and go: then ``torch.distributed`` knows the ranks of this site only, and a
            site that joins waits here for the others' next exchange, to continue from them.
        ops: implementation, see :func:`tagc.wrap`.

    Returns:
        The handle, with ``plan()``, ``metrics()``, ``state_dict()``, ``save``, ``load`` and
        ``remove()``. Keep it, or the model.

    Raises:
        ValueError: if the model, its optimizers or its groups do not fit; nothing was sent then
            except this rank's answer.
        tagc.PolicyError: if the policy is not valid, has no section ``sites``, or does not fit the
            model.
        RuntimeError: if sites differ in the model, its shards, the policy or tagc's version, or if
            another rank failed; with a ``torchft.Manager``, if there is no quorum of sites in time.
    """
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group before tagc.sites")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*(optimizer or ())]
    members = TorchftSites(sites) if is_manager(sites) else None
    group = _group_of(sites) if members is None else None
    inside = sharding_groups(model)
    groups = distinct(inside if group is None else [group, *inside])
    check_backends(groups)
    request = _Request(model, optimizers, policy, group, ops)
    request.agree(groups)
    units, config = request.units, request.config
    for warning in request.plan.warnings:
        warn(warning)
    there, release = members or group, lambda: None
    if group is not None and config.delay:
        there, release = own_group(group, groups, units[0].device)
    assert there is not None
    parallel = [group for unit in units for group in unit.parallel]
    identity = (
        f"plan {request.plan.fingerprint[:12]}, policy {request.policy.name} "
        f"({request.policy.hash[:12]}), tagc {_VERSION}"
    )
    exchange = SiteExchange(
        request.anchors,
        config,
        there,
        request.planned,
        identity,
        distinct([*inside, *parallel]) if members is None else inside,
        partial(check_trainable, model, units),
    )
    if members is not None:
        exchange.join()
    return Sites(model, optimizers, exchange, distinct([*groups, *parallel]), release)


def _group_of(sites: object) -> dist.ProcessGroup:
    """This rank's counterparts in all sites."""
    group = sites.get_group() if isinstance(sites, DeviceMesh) else sites
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"sites=... has type {type(group).__name__}; give the dimension of the mesh that "
            "connects the sites, its group, or a torchft.Manager"
        )
    return group


@dataclass
class _Request:
    """The request of one rank, which all ranks of all sites must agree on before any of them sends
    anything else. Every step may read what those before it found."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    given_policy: str | os.PathLike[str] | Mapping[str, Any] | Policy
    group: dist.ProcessGroup | None  # of the sites; None if they come and go
    ops: str | None

    def agree(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Take all steps, or raise on all ranks."""
        steps = {
            "version": lambda: _VERSION,
            "policy": self._load_policy,
            "model": self._find_units,
            "optimizer": self._check_optimizers,
            "plan": self._make_anchors,
        }
        agree_on(
            groups,
            {name: lambda step=step: (None, step()) for name, step in steps.items()},
            doing="tagc.sites",
            remedy=(
                "Every site must call tagc.sites with the same model, held in the same way over as "
                "many ranks, and the same policy and tagc version"
            ),
        )

    def _load_policy(self) -> str:
        self.policy = loaded = Policy.load(self.given_policy)
        if loaded.sites is None:
            raise PolicyError(
                f"policy {loaded.name!r} has no section sites: add sites: {{every: 32}}, or choose "
                "the built-in policy sites"
            )
        if is_disabled():
            raise ValueError(
                f"{DISABLE}=1, but sites do not train without their exchange; unset it, or use a "
                "policy with codec dense"
            )
        self.config = loaded.sites
        return f"{loaded.name} ({loaded.hash[:12]})"

    def _find_units(self) -> str:
        model, group, fragments = self.model, self.group, self.config.fragments
        if torch.is_inference_mode_enabled():
            raise ValueError("tagc.sites was called in torch.inference_mode(); call it outside")
        if sites_of(model) is not None:
            raise ValueError("this model already has sites; call remove() on their handle first")
        if group is not None and group.size() < 2:
            raise ValueError("sites=... has one rank: a single site has nothing to exchange")
        wrapped = attached(model)
        if wrapped is not None and wrapped.has_replicas:
            raise ValueError(
                "tagc.wrap averages this model's gradients over replicas in every step, and sites "
                "train apart: leave out replicas=... there, or sites"
            )
        inner = None if wrapped is None else wrapped.units
        self.units, description = site_units(model, group, fragments, inner)
        if fragments > len(self.units):
            raise ValueError(
                f"the policy has {fragments} fragments, but the model has {len(self.units)} "
                "units to divide among them: give fewer, or shard the model in more units"
            )
        if group is None and self.units[0].whole and self.units[0].shards > 1:
            raise ValueError(
                "DistributedDataParallel over several ranks inside a site that comes and goes: its "
                "ranks may continue from different sites; use fully_shard inside a site"
            )
        return description

    def _check_optimizers(self) -> str:
        if not self.optimizers or not all(isinstance(o, Optimizer) for o in self.optimizers):
            raise ValueError("tagc.sites needs the torch.optim.Optimizer of the model, or several")
        groups = (group for one in self.optimizers for group in one.param_groups)
        held = {id(param) for group in groups for param in group["params"]}
        missing = [
            info.name
            for unit in self.units
            for info, param in zip(unit.info.params, unit.trainable(), strict=True)
            if id(param) not in held
        ]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {as_list(missing)}: make it after fully_shard, and "
                "pass all optimizers of the model as a list"
            )
        return f"{len(self.optimizers)} optimizers"

    def _make_anchors(self) -> str:
        units, policy, ops = self.units, self.policy, self.ops
        gloo = self.group is None or on_gloo(units)

        @cache
        def planned(number: int) -> Plan:
            """The plan for a number of sites. It outlives the request, which holds optimizers."""
            infos = [between_sites(unit.info, number) for unit in units]
            return with_kernels(units, build_plan(infos, policy, gloo=gloo), ops)

        self.planned = planned
        self.plan = planned(units[0].group.size())
        for unit in self.plan.units if self.group is None else ():
            rules = (segment.codec.feedback for segment in unit.segments)
            if any(rule is not None and rule.owner_state for rule in rules):
                raise ValueError(
                    f"unit {unit.info.label!r} has feedback with a lead, whose owners keep what "
                    "was sent last, and an owner may die: leave lead out for sites that come and go"
                )
        pairs = enumerate(zip(self.units, self.plan.units, strict=True))
        self.anchors = [Anchor(unit, of, self.config, self.ops, i) for i, (unit, of) in pairs]
        return self.plan.fingerprint[:12]


def site_units(
    model: nn.Module,
    counterparts: dist.ProcessGroup | None,
    fragments: int,
    wrapped: Sequence[Unit] | None,
) -> tuple[list[SiteUnit], str]:
    """The units of a model to exchange, and how it is held inside a site, as text.

    Args:
        counterparts: this rank's counterparts in all sites; None if sites come and go: the units
            are those of two sites then, with a group that sends nothing.
        fragments: how many parts the units are to be divided into.
        wrapped: the units of a model that ``tagc.wrap`` has wrapped; None if it is not.
    """
    group: Any = counterparts or SilentGroup(2)
    integration = integration_of(model) if any(i.shards(model) for i in INTEGRATIONS) else None
    if integration is FSDP2:
        inner = FSDP2.find_units(model) if wrapped is None else wrapped
        units = [_of_shards(unit, group) for unit in inner if unit.info.params]
    elif integration is None:
        named = [(plain_name(name), param) for name, param in model.named_parameters()]
        for name, param in named:
            if isinstance(param, DTensor):
                raise ValueError(
                    f"parameter {name!r} is a DTensor of a model that is not sharded by "
                    "fully_shard; apply fully_shard inside a site"
                )
        units = _of_whole(named, None, group, fragments)
    elif integration is DDP:
        units = _of_whole(*ddp.whole_params(model), group, fragments)
    else:
        raise ValueError(
            f"the model is held by {integration.name}, which sites do not support; use "
            "DistributedDataParallel or fully_shard inside a site"
        )
    if not units:
        raise ValueError("the model has no trainable parameters")
    check_trainable(model, units)
    for unit in units if counterparts is not None else ():
        # Otherwise their parameters would be mixed up.
        if unit.inner is not None and len({*ranks_of(unit.inner)} & {*ranks_of(group)}) > 1:
            raise ValueError(
                f"unit {unit.info.label!r} is sharded or data parallel over ranks that sites=... "
                "says are in different sites: use the dimension of the mesh inside a site only"
            )
    return units, _description(units, "one device" if integration is None else integration.name)


def _of_shards(unit: Unit, group: dist.ProcessGroup) -> SiteUnit:
    if unit.replicas is not None:
        raise ValueError(
            f"unit {unit.info.label!r} is sharded and replicated inside a site (HSDP); give "
            "fully_shard a mesh of one dimension inside a site"
        )
    return SiteUnit(
        info=between_sites(unit.info, group.size()),
        group=group,
        device=unit.device,
        parallel=unit.parallel,
        inner=unit.group,
        whole=False,
        _params=unit,
    )


def _of_whole(
    named: Sequence[Named],
    inner: dist.ProcessGroup | None,
    group: dist.ProcessGroup,
    fragments: int,
) -> list[SiteUnit]:
    rows = 1 if inner is None else inner.size()
    total = sum(param.numel() * param.element_size() for _, param in named if param.requires_grad)
    units = []
    for of_unit in parameter_sets(named, min(ddp.UNIT_BYTES, -(-total // fragments))):
        params = [param for _, param in of_unit]
        # Cut over the ranks of the site as over those of a host.
        info = whole_on_hosts(info_of_set(of_unit, group.size()), rows)
        unit = SiteUnit(
            info=between_sites(info, group.size()),
            group=group,
            device=params[0].device,
            inner=inner,
            whole=True,
            _params=params,
        )
        units.append(unit)
    return units


def _description(units: Sequence[SiteUnit], integration: str) -> str:
    numel = sum(param.columns for unit in units for param in unit.info.params)
    params = [(p.name, p.shape, p.columns, p.local) for unit in units for p in unit.info.params]
    shards = f" in {units[0].shards} shards" if units[0].shards > 1 else ""
    digest = f"{zlib.crc32(repr(params).encode()):08x}"
    return f"{integration}{shards}: {len(units)} units, {numel} elements a rank ({digest})"


def own_group(
    group: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup], device: torch.device
) -> tuple[dist.ProcessGroup, Callable[[], None]]:
    """A new group of the ranks of another one, for exchanges that run while training uses that; and
    a function that destroys it. All ranks that ``groups`` connect call it together."""
    mine = ranks_of(group)
    everyones = gather_by_rank(groups, {dist.get_rank(): mine})
    world = dist.group.WORLD
    # Either all processes make all of these groups, in the same order, or only the members.
    everywhere = len(everyones) == dist.get_world_size()
    made = {
        ranks: dist.new_group(
            list(ranks),
            timeout=timeout_of(group, device),
            backend=backend_of(group),
            use_local_synchronization=not everywhere,
            group_desc="tagc between sites",
        )
        for ranks in (sorted(set(everyones.values())) if everywhere else [mine])
    }
    own = made[mine]
    assert isinstance(own, dist.ProcessGroup)
    # A rank that destroys it must not close connections that another one still makes.
    Transport(own).all_reduce(torch.zeros(1, dtype=torch.float32, device=device)).wait()

    def release() -> None:
        # Unless the user has destroyed all groups. Groups of some of the processes stay, because
        # torch would use their names again.
        if everywhere and world is dist.group.WORLD:
            dist.destroy_process_group(own)

    return own, release
