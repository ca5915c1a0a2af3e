"""``tagc.wrap`` and the compressor that it leaves behind."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tagc.agreement import agree_on
from tagc.auto import is_automatic, measured_choice
from tagc.fsdp1 import FSDP1Unit, check_policy
from tagc.fsdp2 import FSDP2Unit
from tagc.gatherer import UnitGatherer
from tagc.metrics import Metrics, collect
from tagc.ops import Ops, get_ops
from tagc.plan import Plan, UnitInfo, UnitPlan
from tagc.planning import Choose, build_plan
from tagc.policy import Policy, PolicyError
from tagc.reducer import UnitReducer
from tagc.replicas import ReplicaAverage
from tagc.state import Reduced, State
from tagc.state_folders import open_folder, save_folder
from tagc.state_format import OneRank, to_state_dict
from tagc.units import Unit, find_units, sharding_groups
from tagc.version import __version__
from tagc.workspace import Workspace

Model = TypeVar("Model", bound=nn.Module)

# On the model itself, so that both are garbage together.
_ATTRIBUTE = "_tagc_compressor"
_DISABLE = "TAGC_DISABLE"


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
    """Handle on a wrapped model; get it with :func:`tagc.compressor`.

    It is ``Stateful``: put it into the state dict of ``torch.distributed.checkpoint`` beside model
    and optimizer, and a resumed run goes on as if it had never stopped, to the bit. Or ``save`` and
    ``load`` a folder of safetensors files.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        units: Sequence[Unit],
        installed: _Installed,
        groups: list[dist.ProcessGroup],
        *,
        disabled: bool = False,
    ) -> None:
        self._model, self._plan, self._units, self._installed = model, plan, units, installed
        self._groups, self._disabled = groups, disabled

    def plan(self) -> Plan:
        """What happens to every parameter; print it."""
        return self._plan

    def metrics(self) -> Metrics:
        """What happened so far on this rank. Waits for the device; no collective."""
        gatherers = [] if self._disabled else self._installed.gatherers
        pairs = zip(_fsdp2(self._units), gatherers, strict=False)
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

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state between two steps: copies of all residuals, by parameter, and what
        else the next step depends on. Waits for the device; no collective.

        All values are tensors, with names that say whose state it is: number of ranks, policy,
        plan and rank. (``torch.distributed.checkpoint`` takes tensors of equal names on several
        ranks for copies of one.)

        Raises:
            ValueError: if a parameter is sharded in a way that has no such state.
        """
        state = self._state()
        return to_state_dict(state.about(), state.take())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, force: bool = False) -> None:
        """Go on where ``state_dict`` was taken, by the same rank of as many. Call it on all ranks.

        Args:
            force: take also what was saved with another policy, and drop what has no place.

        Raises:
            tagc.StateError: if the state is not valid, of another policy, another number of ranks
                (see :meth:`load`), or something would be dropped; nothing was changed.
            RuntimeError: likewise, but on another rank, or the ranks' states differ.
        """
        self._state().load(lambda: OneRank(state_dict), force=force)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state to a folder that all ranks share: a safetensors file a rank, with
        policy, plan, step and ranks as metadata. Call it on all ranks, between two steps.

        The folder holds what it held before until all files are complete, whatever happens.

        Raises:
            OSError: if writing fails.
            tagc.StateError: if the ranks do not share the folder.
            RuntimeError: if that happened on another rank.
        """
        save_folder(Path(folder), self._state())

    def load(
        self, folder: str | os.PathLike[str], *, key: str = "tagc", force: bool = False
    ) -> None:
        """Load what :meth:`save` wrote to a folder, or ``torch.distributed.checkpoint``, from any
        number of ranks. Call it on all ranks.

        With the same ranks and plan the run goes on as if it had never stopped. Otherwise every
        parameter's residuals are handed out anew, so that their sum over ranks stays the same;
        thresholds and counters start anew.

        Args:
            key: of the compressor in the state dict of a ``torch.distributed.checkpoint``.
            force: load also what was saved with another policy, and drop, with a warning, what has
                no place.

        Raises:
            tagc.StateError: if there is no valid state, or one of another policy, or something
                would be dropped; nothing was changed.
            RuntimeError: likewise, but on another rank, or the ranks' states differ.
        """
        self._state().load(lambda: open_folder(Path(folder), key), force=force)

    def _state(self) -> State:
        made = self._installed
        reduced = [
            Reduced(
                direction=reducer.plan.direction,
                reducer=reducer,
                shard=unit.group.rank(),
                shards=unit.group.size(),
            )
            for reducers in (made.reducers, made.replicas)
            for unit, reducer in zip(self._units, reducers, strict=False)
        ]
        return State(plan=self._plan, groups=self._groups, reduced=reduced, gathered=made.gatherers)

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
        return [
            kept.clone()
            for reducer in (*self._installed.reducers, *self._installed.replicas)
            for kept in (*reducer.residuals.values(), *reducer.averages.values())
        ]

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
        with self._residuals() as residuals:
            if [r.shape for r in residuals] != [c.shape for c in copy]:
                raise ValueError("the copy is not of this model's residuals under this plan")
            for residual, saved in zip(residuals, copy, strict=True):
                if isinstance(where, Tensor):
                    saved = torch.where(where.to(residual.device, torch.bool), saved, residual)
                elif not where:
                    continue
                residual.copy_(saved)

    @contextmanager
    def _residuals(self) -> Iterator[list[Tensor]]:
        with ExitStack() as stack:
            yield [
                kept
                for reducer in (*self._installed.reducers, *self._installed.replicas)
                for kept in (
                    *stack.enter_context(reducer.opened()).values(),
                    *reducer.averages.values(),
                )
            ]

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
        if getattr(model, _ATTRIBUTE, None) is not None:
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

    def make() -> tuple[tuple[Plan, _Installed], str]:
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
            _average_natively(_fsdp2(units), replica_group)
    handle = Compressor(model, plan, units, installed, groups, disabled=disabled)
    object.__setattr__(model, _ATTRIBUTE, handle)
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


def _fsdp2(units: Sequence[Unit]) -> list[FSDP2Unit]:
    """Those units whose all-gather and all-reduce can be replaced, too: all, or none."""
    return [unit for unit in units if isinstance(unit, FSDP2Unit)]


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
        gathers=[u.gather_info for u in _fsdp2(units)],
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
        parameter_dtype=next((u.gather_info.dtype for u in _fsdp2(units)), torch.float32),
        replicas=replica_group,
    )


def _make(units: Sequence[Unit], plan: Plan, ops: str | None) -> _Installed:
    workspaces: dict[Any, Workspace] = {}
    made = _Installed()
    if plan.replicas and any(unit.has_all_reduce_hook for unit in _fsdp2(units)):
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
        for unit, unit_plan in zip(_fsdp2(units), plan.parameters, strict=True):
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
    units: Sequence[Unit], installed: _Installed, replica_group: dist.ProcessGroup | None
) -> None:
    for unit, reducer in zip(units, installed.reducers, strict=False):
        unit.install(reducer)
    for unit, gatherer in zip(_fsdp2(units), installed.gatherers, strict=False):
        unit.install_gather(gatherer.gather)
    if replica_group is not None:
        for unit, reducer in zip(_fsdp2(units), installed.replicas, strict=True):
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
