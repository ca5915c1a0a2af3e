"""``tagc.wrap``: what stands in for FSDP's collectives is planned, made and installed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tagc.agreement import agree_on
from tagc.auto import is_automatic, measured_choice
from tagc.fsdp1 import FSDP1Unit, check_policy
from tagc.fsdp2 import FSDP2Unit
from tagc.gatherer import UnitGatherer
from tagc.handle import Compressor, Installed, attach, attached
from tagc.ops import Ops, get_ops
from tagc.plan import Plan, UnitInfo, UnitPlan
from tagc.planning import Choose, build_plan
from tagc.policy import Policy, PolicyError
from tagc.reducer import UnitReducer
from tagc.replicas import ReplicaAverage
from tagc.units import Unit, find_units, fsdp2_units, sharding_groups
from tagc.version import __version__
from tagc.workspace import Workspace

Model = TypeVar("Model", bound=nn.Module)

_DISABLE = "TAGC_DISABLE"


def wrap(
    model: Model,
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "attn-only",
    *,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    ops: str | None = None,
) -> Model:
    """Compress what ``policy`` selects of FSDP's traffic.

    Call it once, on every rank, after ``fully_shard`` and before the first backward. It gathers
    a few hundred bytes from each rank to check that all agree; a policy with ``codec: auto`` also
    measures the link, for a second or two.

    With the environment variable ``TAGC_DISABLE=1`` (on all ranks) it checks all the same and
    compresses nothing: training is native, to the bit. State that is loaded is kept as it is, and
    saved again.

    FSDP1 is compressed too, gradients only, by its communication hook. A segment then has as many
    columns as the shard that has most of its parameters, so that a policy of several rules may
    send more than for FSDP2; the plan says how much.

    Args:
        model: a model to which ``fully_shard`` was applied, or the outermost
            ``FullyShardedDataParallel``, on its device; changed in place.
        policy: name of a built-in policy (``tagc.policies()``), path of a YAML file, mapping, or
            :class:`tagc.Policy`.
        replicas: the ranks that hold the same shard in other copies of the sharded model, as a
            1-D mesh or a group: the model is sharded over ``mesh["shard"]`` only, and tagc
            averages gradients over ``mesh["replicate"]``, as the policy's ``replicas`` say. FSDP2
            only.
        ops: implementation, see :func:`tagc.ops.get_ops`. The one for CPUs compiles its kernels
            here: some seconds the first time, then they are cached.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not sharded, or already wrapped (as a whole or in part), or
            has a communication hook of its own.
        tagc.PolicyError: if the policy is not valid, or compresses nothing in this model, or is
            for what FSDP1 cannot do.
        RuntimeError: if the ranks disagree, or wrapping failed on another rank. (A rank whose
            model is not sharded at all has no group to tell: the others learn of it from the
            process group's timeout.)
    """
    replica_group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    # Not of all ranks: with pipeline stages only some of them may have something to wrap.
    groups = sharding_groups(model)
    if replica_group is not None:
        groups.append(replica_group)

    units: list[Unit] = []

    def find() -> tuple[None, str]:
        if attached(model) is not None:
            raise ValueError(
                "this model is already wrapped; call tagc.compressor(model).remove() first to "
                "wrap it with another policy"
            )
        units.extend(find_units(model))
        return None, type(units[0]).__name__.removesuffix("Unit")

    def load() -> tuple[Policy, str]:
        loaded = Policy.load(policy)
        if any(isinstance(unit, FSDP1Unit) for unit in units):
            check_policy(loaded, replicas=replica_group is not None)
        if loaded.replicas and replica_group is None:
            raise PolicyError(
                f"policy {loaded.name!r} has rules for replicas: pass tagc.wrap(..., "
                'replicas=mesh["replicate"]), or take a policy without them'
            )
        return loaded, f"{loaded.name} ({loaded.hash[:12]})"

    def switched() -> tuple[bool, str]:
        off = os.environ.get(_DISABLE, "")
        if off not in ("", "0", "1"):
            raise ValueError(f"{_DISABLE} is {off!r}; it must be 1, 0 or unset")
        return off == "1", f"{_DISABLE}={int(off == '1')}"

    # No rank measures or plans before all have a policy: a collective of some hangs.
    agreed = agree_on(
        groups,
        {
            "version": lambda: (None, __version__),
            "switch": switched,
            "model": find,
            "policy": load,
        },
    )
    disabled, loaded = agreed["switch"], agreed["policy"]

    def make() -> tuple[tuple[Plan, Installed], str]:
        plan = _plan(units, loaded, replica_group, choose)
        # Where nothing runs, nothing has to be compiled for it.
        return (plan, _make(units, plan, "reference" if disabled else ops)), plan.fingerprint[:12]

    choose = _chooser(units, loaded, ops, replica_group)
    plan, installed = agree_on(groups, {"plan": make})["plan"]

    if all(u.info.world_size == 1 for u in units) and replica_group is None:
        installed.clear()
        warnings.warn(
            "tagc.wrap does nothing at world size 1: FSDP skips the reduce-scatter", stacklevel=2
        )
    if not disabled:
        _install(units, installed, replica_group)
    else:
        warnings.warn(f"{_DISABLE}=1: tagc compresses nothing; unset it to compress", stacklevel=2)
        if replica_group is not None:
            _average_natively(fsdp2_units(units), replica_group)
    handle = Compressor(model, plan, units, installed, groups, disabled=disabled)
    attach(model, handle)
    return model


def _plan(
    units: Sequence[Unit],
    policy: Policy,
    replica_group: dist.ProcessGroup | None,
    choose: Choose | None,
) -> Plan:
    replicas: list[UnitInfo] = []
    if replica_group is not None:
        size = replica_group.size()
        replicas = [
            UnitInfo(name=u.info.name, params=u.info.params, world_size=size, dtype=u.info.dtype)
            for u in units
        ]
    return build_plan(
        [u.info for u in units],
        policy,
        gathers=[u.gather_info for u in fsdp2_units(units)],
        replicas=replicas,
        choose=choose,
    )


def _chooser(
    units: Sequence[Unit],
    policy: Policy,
    ops: str | None,
    replica_group: dist.ProcessGroup | None,
) -> Choose | None:
    if not is_automatic(policy):
        return None
    return measured_choice(
        [(u.group, u.device) for u in units],
        ops,
        policy,
        dtype=units[0].info.dtype,
        parameter_dtype=next((u.gather_info.dtype for u in fsdp2_units(units)), torch.float32),
        replicas=replica_group,
    )


def _make(units: Sequence[Unit], plan: Plan, ops: str | None) -> Installed:
    workspaces: dict[Any, Workspace] = {}
    made = Installed()
    if plan.replicas and any(unit.has_all_reduce_hook for unit in fsdp2_units(units)):
        raise ValueError(
            "the model has an all-reduce hook of its own (set_all_reduce_hook), which averaging "
            "over replicas would replace; remove it, or leave replicas out of tagc.wrap"
        )

    def chosen(unit: Unit, unit_plan: UnitPlan) -> Ops:
        # A unit that stays dense needs no operators, nor a warning about them.
        return get_ops(unit.device, ops if unit_plan.compressed else "reference")

    def reducer(i: int, unit: Unit, unit_plan: UnitPlan) -> UnitReducer:
        workspace = workspaces.setdefault(unit.device, Workspace(unit.device))
        # Units differ in their seeds, so that equal layouts do not share bad luck.
        seed = (i * 0x9E3779B1) % 2**31
        return UnitReducer(unit_plan, chosen(unit, unit_plan), unit.device, workspace, seed)

    for i, (unit, unit_plan) in enumerate(zip(units, plan.units, strict=True)):
        made.reducers.append(reducer(i, unit, unit_plan))
    for i, (unit, unit_plan) in enumerate(zip(units, plan.replicas, strict=bool(plan.replicas))):
        made.replicas.append(reducer(i, unit, unit_plan))
    if any(unit_plan.compressed for unit_plan in plan.parameters):
        # On every unit, so that bytes are counted of those, too, that stay as they are.
        for unit, unit_plan in zip(fsdp2_units(units), plan.parameters, strict=True):
            unit.check_gather()
            if unit_plan.compressed and unit.gather_info.dtype == torch.uint8:
                raise ValueError(
                    f"unit {unit.info.name or '(root)'!r} has parameters of several dtypes, which "
                    "FSDP gathers as bytes; leave them out of the policy's rules for parameters, "
                    "or give the unit a MixedPrecisionPolicy(param_dtype=...)"
                )
            workspace = workspaces.setdefault(unit.device, Workspace(unit.device))
            made.gatherers.append(
                UnitGatherer(unit_plan, chosen(unit, unit_plan), unit.device, workspace)
            )
    return made


def _install(
    units: Sequence[Unit], installed: Installed, replica_group: dist.ProcessGroup | None
) -> None:
    for unit, reducer in zip(units, installed.reducers, strict=False):
        unit.install(reducer)
    for unit, gatherer in zip(fsdp2_units(units), installed.gatherers, strict=False):
        unit.install_gather(gatherer.gather)
    if replica_group is not None:
        for unit, reducer in zip(fsdp2_units(units), installed.replicas, strict=True):
            _install_average(unit, reducer, replica_group)


def _average_natively(units: Sequence[FSDP2Unit], group: dist.ProcessGroup) -> None:
    """Average over replicas, which FSDP knows nothing of, by the backend's all-reduce."""
    infos = [
        UnitInfo(
            name=u.info.name, params=u.info.params, world_size=group.size(), dtype=u.info.dtype
        )
        for u in units
    ]
    plan = build_plan([u.info for u in units], Policy.load("dense"), replicas=infos)
    for unit, unit_plan in zip(units, plan.replicas, strict=True):
        workspace, ops = Workspace(unit.device), get_ops(unit.device, "reference")
        reducer = UnitReducer(unit_plan, ops, unit.device, workspace, seed=0)
        _install_average(unit, reducer, group)


def _install_average(unit: FSDP2Unit, reducer: UnitReducer, group: dist.ProcessGroup) -> None:
    unit.install_all_reduce(ReplicaAverage(reducer, group, lambda: unit.all_reduces))
