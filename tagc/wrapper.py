"""``tagc.wrap`` and the compressor that it leaves behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from tagc.fsdp2 import FSDP2Unit, find_units
from tagc.metrics import Metrics, collect
from tagc.ops import get_ops
from tagc.plan import Plan, build_plan
from tagc.policy import Policy
from tagc.reducer import UnitReducer
from tagc.version import __version__
from tagc.workspace import Workspace

Model = TypeVar("Model", bound=nn.Module)

# On the model itself, so that both are garbage together.
_ATTRIBUTE = "_tagc_compressor"


class Compressor:
    """Handle on a wrapped model; get it with :func:`tagc.compressor`."""

    def __init__(
        self, model: nn.Module, plan: Plan, units: list[FSDP2Unit], reducers: list[UnitReducer]
    ) -> None:
        self._model, self._plan, self._units, self._reducers = model, plan, units, reducers

    def plan(self) -> Plan:
        """What happens to every parameter's gradient; print it."""
        return self._plan

    def metrics(self) -> Metrics:
        """What happened so far on this rank. Waits for the device; no collective."""
        return collect(self._reducers)

    @property
    def wire_bytes(self) -> int:
        """Gradient bytes that this rank sent so far; free to ask for in every step."""
        return sum(reducer.wire_bytes for reducer in self._reducers)

    def remove(self) -> None:
        """Give FSDP its own reduce-scatter back and drop all residuals. The model may be wrapped
        again afterwards."""
        for unit in self._units:
            unit.restore()
        self._reducers.clear()
        if getattr(self._model, _ATTRIBUTE, None) is self:
            delattr(self._model, _ATTRIBUTE)


def wrap(
    model: Model,
    policy: str | os.PathLike[str] | Mapping[str, Any] | Policy = "attn-only",
    *,
    ops: str | None = None,
) -> Model:
    """Compress the gradients that ``policy`` selects in FSDP2's reduce-scatter.

    Call it once, on every rank, after ``fully_shard`` and before the first backward. It gathers
    a few hundred bytes from each rank to check that all agree.

    Args:
        model: a model to which ``fully_shard`` was applied; changed in place.
        policy: name of a built-in policy (``tagc.policies()``), path of a YAML file, mapping, or
            :class:`tagc.Policy`.
        ops: implementation, see :func:`tagc.ops.get_ops`. The one for CPUs compiles its kernels
            here: some seconds the first time, then they are cached.

    Returns:
        ``model``.

    Raises:
        ValueError: if the model is not sharded, or already wrapped (as a whole or in part).
        tagc.PolicyError: if the policy is not valid, or compresses nothing in this model.
        RuntimeError: if the ranks disagree, or wrapping failed on another rank. (A rank whose
            model is not sharded at all, or already wrapped, has nobody to tell: the others learn
            of it from the process group's timeout.)
    """
    if getattr(model, _ATTRIBUTE, None) is not None:
        raise ValueError(
            "this model is already wrapped; call tagc.compressor(model).remove() first to wrap "
            "it with another policy"
        )
    units = find_units(model)
    made: tuple[Plan, list[UnitReducer]] | None = None
    failure: Exception | None = None
    try:
        plan = build_plan([u.info for u in units], Policy.load(policy))
        made = plan, _make_reducers(units, plan, ops)
    except Exception as error:
        failure = error
    _check_agreement(units, None if made is None else made[0], failure)
    assert made is not None
    plan, reducers = made

    if all(u.info.world_size == 1 for u in units):
        reducers.clear()
        warnings.warn(
            "tagc.wrap does nothing at world size 1: FSDP skips the reduce-scatter", stacklevel=2
        )
    for unit, reducer in zip(units, reducers, strict=False):
        unit.install(reducer.reduce)
    object.__setattr__(model, _ATTRIBUTE, Compressor(model, plan, units, reducers))
    return model


def _make_reducers(units: list[FSDP2Unit], plan: Plan, ops: str | None) -> list[UnitReducer]:
    workspaces: dict[Any, Workspace] = {}
    reducers = []
    for i, (unit, unit_plan) in enumerate(zip(units, plan.units, strict=True)):
        workspace = workspaces.setdefault(unit.device, Workspace(unit.device))
        # Units differ in their seeds, so that equal layouts do not share bad luck.
        seed = (i * 0x9E3779B1) % 2**31
        # A unit that stays dense needs no operators, nor a warning about them.
        chosen = get_ops(unit.device, ops if unit_plan.sketched else "reference")
        for segment in unit_plan.sketched:
            assert segment.sketch is not None
            chosen.prepare(segment.sketch.layout, unit.info.dtype, segment.sketch.residual_dtype)
        reducers.append(UnitReducer(unit_plan, chosen, unit.device, workspace, seed))
    return reducers


def compressor(model: nn.Module) -> Compressor:
    """The compressor of a wrapped model.

    Raises:
        ValueError: if the model is not wrapped.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if found is None:
        raise ValueError("this model is not wrapped: call tagc.wrap(model, policy=...) first")
    return found


def _check_agreement(units: list[FSDP2Unit], plan: Plan | None, failure: Exception | None) -> None:
    """Raise on every rank unless all ranks made the same plan.

    A rank whose own plan failed takes part, so that the others learn of it instead of hanging in
    their first collective.
    """
    mine = {
        "version": __version__,
        "policy": None if plan is None else f"{plan.policy.name} ({plan.policy.hash[:12]})",
        "plan": None if plan is None else plan.fingerprint[:12],
        "error": None if failure is None else f"{type(failure).__name__}: {failure}",
    }
    groups = {id(u.group): u.group for u in units}
    gathered: dict[int, list[dict[str, str | None]]] = {}
    for key, group in groups.items():
        gathered[key] = [{} for _ in range(group.size())]
        dist.all_gather_object(gathered[key], mine, group=group)
    if failure is not None:
        raise failure
    for said in gathered.values():
        for rank, other in enumerate(said):
            if other["error"] is not None:
                raise RuntimeError(f"tagc.wrap failed on rank {rank}: {other['error']}")
        for what in ("version", "policy", "plan"):
            if len({other[what] for other in said}) > 1:
                listing = ", ".join(f"rank {r} has {o[what]}" for r, o in enumerate(said))
                raise RuntimeError(
                    f"tagc {what} differs between ranks: {listing}. Every rank must call "
                    "tagc.wrap with the same model, policy and tagc version"
                )
