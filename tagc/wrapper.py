"""``tagc.wrap`` and the compressor that it leaves behind."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tagc.agreement import agree_on
from tagc.auto import is_automatic, measured_choice
from tagc.fsdp2 import FSDP2Unit, find_units, sharding_groups
from tagc.gatherer import UnitGatherer
from tagc.metrics import Metrics, collect
from tagc.ops import Ops, get_ops
from tagc.plan import Choose, Plan, UnitInfo, UnitPlan, build_plan
from tagc.policy import Policy, PolicyError
from tagc.reducer import UnitReducer
from tagc.replicas import ReplicaAverage
from tagc.version import __version__
from tagc.workspace import Workspace

Model = TypeVar("Model", bound=nn.Module)

# On the model itself, so that both are garbage together.
_ATTRIBUTE = "_tagc_compressor"


@dataclass
class _Installed:
    """What replaces FSDP's collectives; the last two are empty where the policy leaves them."""

    reducers: list[UnitReducer] = field(default_factory=list)
    gatherers: list[UnitGatherer] = field(default_factory=list)
    replicas: list[UnitReducer] = field(default_factory=list)

    def clear(self) -> None:
        for part in (*self.reducers, *self.gatherers, *self.replicas):
            part.release()
        self.reducers.clear()
        self.gatherers.clear()
        self.replicas.clear()


class Compressor:
    """Handle on a wrapped model; get it with :func:`tagc.compressor`."""

    def __init__(
        self, model: nn.Module, plan: Plan, units: list[FSDP2Unit], installed: _Installed
    ) -> None:
        self._model, self._plan, self._units, self._installed = model, plan, units, installed

    def plan(self) -> Plan:
        """What happens to every parameter; print it."""
        return self._plan

    def metrics(self) -> Metrics:
        """What happened so far on this rank. Waits for the device; no collective."""
        gatherers = self._installed.gatherers
        pairs = zip(self._units, gatherers, strict=False)
        squares = [gatherer.relative_error(unit.shard()) for unit, gatherer in pairs]
        total = sum(whole for _, whole in squares)
        return collect(
            self._installed.reducers,
            replicas=self._installed.replicas,
            parameter_bytes=(
                sum(g.wire_bytes for g in gatherers),
                sum(g.dense_bytes for g in gatherers),
            ),
            parameter_error=(sum(e for e, _ in squares) / total) ** 0.5 if total else 0.0,
        )

    @property
    def wire_bytes(self) -> int:
        """Gradient bytes that this rank sent so far in reduce-scatters; free to ask for in every
        step."""
        return sum(reducer.wire_bytes for reducer in self._installed.reducers)

    @property
    def parameter_wire_bytes(self) -> int:
        """Bytes that this rank sent so far in all-gathers; 0 where the policy leaves them to
        FSDP."""
        return sum(gatherer.wire_bytes for gatherer in self._installed.gatherers)

    def scale_residuals(self, factor: float | Tensor) -> None:
        """Tell what is owed that gradients are ``factor`` times as large from now on: after a
        change of the loss scale, by the new scale divided by the old one.

        Residuals are in the units of the gradients that FSDP reduces, which a loss scaler
        multiplies; thresholds follow, too. A power of two changes nothing else. Call it between
        two steps, on every rank with the same factor. A tensor is not looked at: no waiting.

        Args:
            factor: positive and finite, or a tensor ``[]`` on the residuals' device.

        Raises:
            ValueError: if the factor is a number, and not positive and finite.
        """
        if not isinstance(factor, Tensor) and not 0 < factor < math.inf:
            raise ValueError(f"the factor must be positive and finite, got {factor}")
        for reducer in (*self._installed.reducers, *self._installed.replicas):
            reducer.rescale(factor)

    def copy_residuals(self) -> list[Tensor]:
        """What this rank owes now, for :meth:`restore_residuals`; as much memory again as the
        residuals take."""
        return [residual.clone() for residual in self._residuals()]

    def restore_residuals(self, copy: Sequence[Tensor], where: bool | Tensor = True) -> None:
        """Owe again what :meth:`copy_residuals` saw: after a step that the optimizer skipped,
        as if that step had not been. Without it, what the step's finite gradients and older
        residuals sent is lost with the step.

        Args:
            where: restore only if true, a number or a tensor ``[]``, which is not looked at: no
                waiting. A tensor needs memory for one more residual for a moment.

        Raises:
            ValueError: if the copy is of another model or plan.
        """
        residuals = self._residuals()
        if [r.shape for r in residuals] != [c.shape for c in copy]:
            raise ValueError("the copy is not of this model's residuals under this plan")
        for residual, saved in zip(residuals, copy, strict=True):
            if isinstance(where, Tensor):
                saved = torch.where(where.to(residual.device, torch.bool), saved, residual)
            elif not where:
                continue
            residual.copy_(saved)

    def _residuals(self) -> list[Tensor]:
        reducers = (*self._installed.reducers, *self._installed.replicas)
        return [residual for reducer in reducers for residual in reducer.residuals.values()]

    def remove(self) -> None:
        """Give FSDP its own collectives back and drop all residuals. The model may be wrapped
        again afterwards."""
        for unit in self._units:
            unit.restore()
        self._installed.clear()
        if getattr(self._model, _ATTRIBUTE, None) is self:
            delattr(self._model, _ATTRIBUTE)


def wrap(
    model: Model,
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "attn-only",
    *,
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    ops: str | None = None,
) -> Model:
    """Compress what ``policy`` selects of FSDP2's traffic.

    Call it once, on every rank, after ``fully_shard`` and before the first backward. It gathers
    a few hundred bytes from each rank to check that all agree; a policy with ``codec: auto`` also
    measures the link, for a second or two.

    Args:
        model: a model to which ``fully_shard`` was applied; changed in place.
        policy: name of a built-in policy (``tagc.policies()``), path of a YAML file, mapping, or
            :class:`tagc.Policy`.
        replicas: the ranks that hold the same shard in other copies of the sharded model, as a
            1-D mesh or a group: the model is sharded over ``mesh["shard"]`` only, and tagc
            averages gradients over ``mesh["replicate"]``, as the policy's ``replicas`` say.
        ops: implementation, see :func:`tagc.ops.get_ops`. The one for CPUs compiles its kernels
            here: some seconds the first time, then they are cached.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not sharded, or already wrapped (as a whole or in part).
        tagc.PolicyError: if the policy is not valid, or compresses nothing in this model.
        RuntimeError: if the ranks disagree, or wrapping failed on another rank. (A rank whose
            model is not sharded at all has no group to tell: the others learn of it from the
            process group's timeout.)
    """
    replica_group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    # Not of all ranks: with pipeline stages only some of them may have something to wrap.
    groups = sharding_groups(model)
    if replica_group is not None:
        groups.append(replica_group)

    def find() -> tuple[list[FSDP2Unit], str]:
        if getattr(model, _ATTRIBUTE, None) is not None:
            raise ValueError(
                "this model is already wrapped; call tagc.compressor(model).remove() first to "
                "wrap it with another policy"
            )
        return find_units(model), "FSDP2"

    def load() -> tuple[Policy, str]:
        loaded = Policy.load(policy)
        if loaded.replicas and replica_group is None:
            raise PolicyError(
                f"policy {loaded.name!r} has rules for replicas: pass tagc.wrap(..., "
                'replicas=mesh["replicate"]), or take a policy without them'
            )
        return loaded, f"{loaded.name} ({loaded.hash[:12]})"

    # No rank measures or plans before all have a policy: a collective of some hangs.
    agreed = agree_on(
        groups, {"version": lambda: (None, __version__), "model": find, "policy": load}
    )
    units, loaded = agreed["model"], agreed["policy"]

    def make() -> tuple[tuple[Plan, _Installed], str]:
        plan = _plan(units, loaded, replica_group, choose)
        return (plan, _make(units, plan, ops)), plan.fingerprint[:12]

    choose = _chooser(units, loaded, ops, replica_group)
    plan, installed = agree_on(groups, {"plan": make})["plan"]

    if all(u.info.world_size == 1 for u in units) and replica_group is None:
        installed.clear()
        warnings.warn(
            "tagc.wrap does nothing at world size 1: FSDP skips the reduce-scatter", stacklevel=2
        )
    _install(units, installed, replica_group)
    object.__setattr__(model, _ATTRIBUTE, Compressor(model, plan, units, installed))
    return model


def compressor(model: nn.Module) -> Compressor:
    """The compressor of a wrapped model.

    Raises:
        ValueError: if the model is not wrapped.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if found is None:
        raise ValueError("this model is not wrapped: call tagc.wrap(model, policy=...) first")
    return found


def _plan(
    units: Sequence[FSDP2Unit],
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
        gathers=[u.gather_info for u in units],
        replicas=replicas,
        choose=choose,
    )


def _chooser(
    units: Sequence[FSDP2Unit],
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
        parameter_dtype=units[0].gather_info.dtype,
        replicas=replica_group,
    )


def _make(units: Sequence[FSDP2Unit], plan: Plan, ops: str | None) -> _Installed:
    workspaces: dict[Any, Workspace] = {}
    made = _Installed()
    if plan.replicas and any(unit.has_all_reduce_hook for unit in units):
        raise ValueError(
            "the model has an all-reduce hook of its own (set_all_reduce_hook), which averaging "
            "over replicas would replace; remove it, or leave replicas out of tagc.wrap"
        )

    def chosen(unit: FSDP2Unit, unit_plan: UnitPlan) -> Ops:
        # A unit that stays dense needs no operators, nor a warning about them.
        return get_ops(unit.device, ops if unit_plan.compressed else "reference")

    def reducer(i: int, unit: FSDP2Unit, unit_plan: UnitPlan) -> UnitReducer:
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
        for unit, unit_plan in zip(units, plan.parameters, strict=True):
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
    units: Sequence[FSDP2Unit], installed: _Installed, replica_group: dist.ProcessGroup | None
) -> None:
    for unit, reducer in zip(units, installed.reducers, strict=False):
        unit.install(reducer.reduce)
    for unit, gatherer in zip(units, installed.gatherers, strict=False):
        unit.install_gather(gatherer.gather)
    if replica_group is not None:
        for unit, reducer in zip(units, installed.replicas, strict=True):
            average = ReplicaAverage(reducer, replica_group, lambda unit=unit: unit.all_reduces)
            unit.install_all_reduce(average)
