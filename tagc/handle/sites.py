"""``tagc.sites``: trains a model in several sites that exchange changes of parameters."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from tagc.attach import Levels, sharding_groups
from tagc.attach.sites import OwnGroup, SiteUnit, site_units
from tagc.basics.switch import DISABLE, is_disabled
from tagc.basics.version import __version__
from tagc.basics.warn import warn
from tagc.checkpoint import State, UnitState
from tagc.codecs import MESSAGE_FORMAT
from tagc.collect import Anchor, SiteExchange, agree_on, check_backends
from tagc.handle.collectives import Collectives, make_collectives, on_gloo
from tagc.handle.compressor import attached
from tagc.handle.handle import Handle
from tagc.handle.readiness import with_kernels
from tagc.handle.site_metrics import SiteMetrics, collect_of_sites
from tagc.plan import Plan, as_list, build_plan
from tagc.policy import Policy, PolicyError
from tagc.policy.sites import SitesConfig

# An attribute of the model, so that both are freed together.
_ATTRIBUTE = "_tagc_sites"


class Sites(Handle):
    """Handle on a model that is trained in several sites; :func:`tagc.sites` returns it.

    It is ``Stateful``: put it into the state dict of ``torch.distributed.checkpoint`` beside model
    and optimizer, or ``save`` and ``load`` a folder of safetensors files. The state has the anchors
    (the parameters that all sites last agreed on), the outer momentum, residuals, averages in
    flight and the count of optimizer steps. Each site saves its own model and optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Sequence[SiteUnit],
        collectives: Collectives,
        exchange: SiteExchange,
        groups: list[dist.ProcessGroup],
        own: OwnGroup | None,
    ) -> None:
        self._model, self._plan, self._units = model, plan, units
        self._collectives, self._exchange, self._groups = collectives, exchange, groups
        self._own = own
        self._hook: Any = None

    @property
    def sites(self) -> int:
        """Number of sites."""
        return self._units[0].group.size()

    @property
    def exchange_state(self) -> SiteExchange:
        """The anchors and the schedule, for inspection; not part of the stable interface."""
        return self._exchange

    def metrics(self) -> SiteMetrics:
        """This rank's counts since ``tagc.sites``. Waits for the device, and for an exchange in
        flight; no collective."""
        return collect_of_sites(self._collectives.reducers, self._exchange)

    def exchange(self) -> None:
        """Exchange all parameters now, as at the end of training. Call it on all ranks, between two
        steps. Unless the policy has an ``alpha``, all sites then have the same parameters.

        Raises:
            RuntimeError: if the sites have different anchors, or a site does not answer in time.
        """
        self._exchange.exchange_all()

    def remove(self) -> None:
        """Stop exchanging, and drop anchors and residuals. Waits for an exchange in flight, and
        does not apply it. The parameters stay as they are. Call it on all ranks."""
        self._hook.remove()
        self._exchange.settle()
        self._collectives.clear()
        if self._own is not None:
            self._own.release()
        if getattr(self._model, _ATTRIBUTE, None) is self:
            delattr(self._model, _ATTRIBUTE)

    def _attach(self, optimizer: Optimizer) -> None:
        mine = weakref.ref(self)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            sites = mine()
            if sites is not None:
                sites._exchange.step()

        self._hook = optimizer.register_step_post_hook(after_step)
        object.__setattr__(self._model, _ATTRIBUTE, self)

    def _state(self) -> State:
        self._exchange.settle()
        anchors = self._exchange.anchors
        parallel = [group for unit in self._units for group in unit.parallel]
        return State(
            plan=self._plan,
            groups=list({id(group): group for group in (*self._groups, *parallel)}.values()),
            reduced=[
                UnitState(
                    direction=anchor.reducer.plan.direction,
                    reducer=anchor.reducer,
                    shard=unit.shard,
                    shards=unit.shards,
                    replica=unit.group.rank(),
                    shared=anchor.shared,
                )
                for unit, anchor in zip(self._units, anchors, strict=True)
            ],
            gathered=(),
            clock=self._exchange,
        )


def sites(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "sites",
    *,
    sites: DeviceMesh | dist.ProcessGroup | None = None,
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
    same parameters then, or load the same state before the first step. Inside a site, gradients
    may be compressed by ``tagc.wrap``.

    Args:
        model: the model as it is held inside a site.
        optimizer: the optimizer of the model's parameters, or several that step one after another.
            The last one counts the steps.
        policy: name of a built-in policy, path of a YAML file, mapping, or :class:`tagc.Policy`,
            with a section ``sites``.
        sites: this rank's counterparts in all sites, with the same shard: a 1-D mesh or a group. By
            default all ranks, if every site is one device.
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
            another rank failed.
    """
    group = sites.get_group() if isinstance(sites, DeviceMesh) else sites
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("call torch.distributed.init_process_group before tagc.sites")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    groups = list({id(g): g for g in (group, *sharding_groups(model))}.values())
    check_backends(groups)
    agreed = _agree_on_request(model, optimizers, policy, group, groups)
    loaded, config, units = agreed

    def make() -> tuple[tuple[Plan, Collectives], str]:
        plan = build_plan([unit.info for unit in units], loaded, gloo=on_gloo(units))
        plan = with_kernels(units, plan, ops)
        made = make_collectives(units, plan, Levels(units, None, {}), ops, None)
        return (plan, made), plan.fingerprint[:12]

    plan, collectives = agree_on(groups, {"plan": make}, doing=_DOING, remedy=_REMEDY)["plan"]
    own = OwnGroup(group, groups) if config.delay else None
    used = group if own is None else own.group
    pairs = zip(units, collectives.reducers, strict=True)
    anchors = [Anchor(unit, reducer, used, unit.device, config) for unit, reducer in pairs]
    for warning in plan.warnings:
        warn(warning)
    exchange = SiteExchange(anchors, used, config)
    made = Sites(model, plan, units, collectives, exchange, groups, own)
    made._attach(optimizers[-1])
    return made


_DOING = "tagc.sites"
_REMEDY = (
    "Every site must call tagc.sites with the same model, held in the same way over as many ranks, "
    "and the same policy and tagc version"
)


def _agree_on_request(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy,
    group: dist.ProcessGroup,
    groups: Sequence[dist.ProcessGroup],
) -> tuple[Policy, SitesConfig, list[SiteUnit]]:
    """Make all ranks of all sites agree, before any of them sends anything else."""
    loaded: list[Policy] = []
    found: list[SiteUnit] = []

    def load() -> tuple[SitesConfig, str]:
        loaded.append(Policy.load(policy))
        (one,) = loaded
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
        if getattr(model, _ATTRIBUTE, None) is not None:
            raise ValueError("this model already has sites; call remove() on their handle first")
        if group.size() < 2:
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
        units, told = site_units(model, group, config.fragments, inner)
        if config.fragments > len(units):
            raise ValueError(
                f"the policy has {config.fragments} fragments, but the model has {len(units)} "
                "units to divide among them: give fewer, or shard the model in more units"
            )
        found.extend(units)
        return None, told

    def check() -> tuple[None, str]:
        if not optimizers:
            raise ValueError("tagc.sites needs the optimizer of the model's parameters")
        held = {id(p) for one in optimizers for of in one.param_groups for p in of["params"]}
        infos = [(info.name, param) for u in found for info, param in _pairs(u)]
        missing = [name for name, param in infos if id(param) not in held]
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


def _pairs(unit: SiteUnit) -> Any:
    return zip(unit.info.params, unit.trainable(), strict=True)
