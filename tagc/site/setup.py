"""``tagc.sites``: trains a model in several sites that exchange changes of parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tagc.attach import sharding_groups
from tagc.attach.torchft import TorchftSites, is_manager
from tagc.basics.switch import DISABLE, is_disabled
from tagc.basics.version import __version__
from tagc.basics.warn import warn
from tagc.collect import agree_on, check_backends
from tagc.handle.compressor import attached
from tagc.plan import as_list
from tagc.plan.messages import MESSAGE_FORMAT
from tagc.policy import Policy, PolicyError
from tagc.policy.rules import SitesConfig
from tagc.site.anchor import Anchor
from tagc.site.elastic import ElasticExchange
from tagc.site.exchange import SiteExchange
from tagc.site.handle import Sites, sites_of
from tagc.site.reducers import SiteReducers
from tagc.site.units import OwnGroup, SiteUnit, check_trainable, site_units


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
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    members = TorchftSites(sites) if is_manager(sites) else None
    elastic = members is not None
    group = _group_of(sites, elastic=elastic)
    inside = sharding_groups(model)
    groups = _distinct(() if group is None else (group,), inside)
    check_backends(groups)
    loaded, config, units = _agree_on_request(model, optimizers, policy, group, groups)

    def make() -> tuple[SiteReducers, str]:
        reducers = SiteReducers(units, loaded, ops, elastic=elastic)
        return reducers, reducers.plan.fingerprint[:12]

    reducers = agree_on(groups, {"plan": make}, doing=_DOING, remedy=_REMEDY)["plan"]
    for warning in reducers.plan.warnings:
        warn(warning)
    own = None
    if config.delay and group is not None:
        own = OwnGroup(group, groups, units[0].device)
    used = group if own is None else own.group
    pairs = zip(units, reducers.reducers, strict=True)
    anchors = [Anchor(unit, reducer, used, config) for unit, reducer in pairs]
    parallel = [group for unit in units for group in unit.parallel]
    check = partial(check_trainable, model, units)
    if members is None:
        exchange = SiteExchange(anchors, used, config, _distinct(inside, parallel), check)
    else:
        identity = (
            f"plan {reducers.plan.fingerprint[:12]}, policy {loaded.name} ({loaded.hash[:12]}), "
            f"tagc {__version__} with messages in format {MESSAGE_FORMAT}"
        )
        exchange = ElasticExchange(anchors, config, members, reducers, identity, inside, check)
        exchange.join()
    return Sites(model, optimizers, reducers, exchange, _distinct(groups, parallel), own)


def _distinct(*groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return list({id(group): group for some in groups for group in some}.values())


def _group_of(sites: object, *, elastic: bool) -> dist.ProcessGroup | None:
    """This rank's counterparts in all sites; None if they come and go."""
    if not dist.is_initialized():
        raise ValueError("call torch.distributed.init_process_group before tagc.sites")
    if elastic:
        return None
    group = sites.get_group() if isinstance(sites, DeviceMesh) else sites
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"sites=... is a {type(group).__name__}; give the dimension of the mesh that connects "
            "the sites, its group, or a torchft.Manager"
        )
    return group


_DOING = "tagc.sites"
_REMEDY = (
    "Every site must call tagc.sites with the same model, held in the same way over as many ranks, "
    "and the same policy and tagc version"
)


def _agree_on_request(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy,
    group: dist.ProcessGroup | None,
    groups: Sequence[dist.ProcessGroup],
) -> tuple[Policy, SitesConfig, list[SiteUnit]]:
    """Make all ranks of all sites agree, before any of them sends anything else."""
    found: list[SiteUnit] = []
    loaded: list[Policy] = []

    def load() -> tuple[SitesConfig, str]:
        loaded.append(one := Policy.load(policy))
        if one.sites is None:
            raise PolicyError(
                f"policy {one.name!r} has no section sites: add sites: {{every: 32}}, or choose "
                "the built-in policy sites"
            )
        if is_disabled():
            raise ValueError(
                f"{DISABLE}=1, but sites do not train without their exchange; unset it, or use a "
                "policy with codec dense"
            )
        return one.sites, f"{one.name} ({one.hash[:12]})"

    def find() -> tuple[None, str]:
        if torch.is_inference_mode_enabled():
            raise ValueError("tagc.sites was called in torch.inference_mode(); call it outside")
        if sites_of(model) is not None:
            raise ValueError("this model already has sites; call remove() on their handle first")
        if group is not None and group.size() < 2:
            raise ValueError("sites=... has one rank: a single site has nothing to exchange")
        config = loaded[0].sites
        assert config is not None
        wrapped = attached(model)
        if wrapped is not None and wrapped.has_replicas:
            raise ValueError(
                "tagc.wrap averages this model's gradients over replicas in every step, and sites "
                "train apart: leave out replicas=... there, or sites"
            )
        inner = None if wrapped is None else wrapped.units
        units, description = site_units(model, group, config.fragments, inner)
        if config.fragments > len(units):
            raise ValueError(
                f"the policy has {config.fragments} fragments, but the model has {len(units)} "
                "units to divide among them: give fewer, or shard the model in more units"
            )
        if group is None and units[0].whole and units[0].shards > 1:
            raise ValueError(
                "DistributedDataParallel over several ranks inside a site that comes and goes: its "
                "ranks may continue from different sites; use fully_shard inside a site"
            )
        found.extend(units)
        return None, description

    def check() -> tuple[None, str]:
        if not optimizers:
            raise ValueError("tagc.sites needs the optimizer of the model's parameters")
        held = {id(p) for one in optimizers for of in one.param_groups for p in of["params"]}
        missing = [
            info.name
            for unit in found
            for info, param in zip(unit.info.params, unit.trainable(), strict=True)
            if id(param) not in held
        ]
        if missing:
            raise ValueError(
                f"the optimizer does not hold {as_list(missing)}: make it after fully_shard, and "
                "pass all optimizers of the model as a list"
            )
        return None, f"{len(optimizers)} optimizers"

    steps = {
        "version": lambda: (None, f"{__version__}, messages in format {MESSAGE_FORMAT}"),
        "policy": load,
        "model": find,
        "optimizer": check,
    }
    agreed = agree_on(groups, steps, doing=_DOING, remedy=_REMEDY)
    return loaded[0], agreed["policy"], found
