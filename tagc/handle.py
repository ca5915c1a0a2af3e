"""The handle that ``tagc.wrap`` leaves on a model: what it counts, saves, loads and takes back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tagc.checkpoint import (
    OneRank,
    Source,
    State,
    UnitState,
    open_folder,
    save_folder,
    to_state_dict,
)
from tagc.comm import UnitGatherer, UnitReducer, copy_step_state, restore_step_state
from tagc.comm.waiting import Waiting
from tagc.fsdp import Levels, OptimizerSteps, Unit
from tagc.metrics import Metrics, collect
from tagc.noise import KeptRates, MeasuredUnit, NoiseFactors, clip_grad_norm
from tagc.plan import Plan
from tagc.warn import warn

# On the model itself, so that both are garbage together.
_ATTRIBUTE = "_tagc_compressor"


@dataclass
class Collectives:
    """What replaces FSDP's collectives, in the order of the units; gatherers and replica reducers
    are empty where the policy leaves them. And the groups that tagc made for it, what tells
    gatherers of an optimizer's steps, and the ranks that hold the same shard in other replicas.
    Where compression is switched off, ``stand_ins`` average over these."""

    reducers: list[UnitReducer] = field(default_factory=list)
    gatherers: list[UnitGatherer] = field(default_factory=list)
    replica_reducers: list[UnitReducer] = field(default_factory=list)
    levels: Levels | None = None
    steps: OptimizerSteps | None = None
    replica_group: dist.ProcessGroup | None = None
    stand_ins: list[UnitReducer] = field(default_factory=list)

    @property
    def waiting(self) -> list[Waiting]:
        """Where micro-batches wait."""
        return [reducer.waiting for reducer in (*self.all_reducers, *self.stand_ins)]

    @property
    def replica(self) -> int:
        """Of the sharded model that this rank is in, from 0."""
        return 0 if self.replica_group is None else self.replica_group.rank()

    @property
    def all_reducers(self) -> list[UnitReducer]:
        """In the reduce-scatter and across replicas."""
        return [*self.reducers, *self.replica_reducers]

    def clear(self) -> None:
        """Drop it all, with the scratch buffers of the operators and the groups."""
        if self.levels is not None:
            self.levels.release()
        if self.steps is not None:
            self.steps.close()
        for part in (*self.all_reducers, *self.gatherers):
            part.release()
        self.reducers.clear()
        self.gatherers.clear()
        self.replica_reducers.clear()


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
        collectives: Collectives,
        groups: list[dist.ProcessGroup],
        *,
        disabled: bool = False,
    ) -> None:
        self._model, self._plan, self._units = model, plan, units
        self._collectives = collectives
        self._groups, self._disabled = groups, disabled
        self._noise: NoiseFactors | None = None
        self._kept: list[KeptRates] = []

    def plan(self) -> Plan:
        """What happens to every parameter; print it."""
        return self._plan

    def metrics(self) -> Metrics:
        """What happened so far on this rank. Waits for the device; no collective."""
        gatherers = [] if self._disabled else self._collectives.gatherers
        pairs = zip(self._units, gatherers, strict=bool(gatherers))
        squares = [gatherer.relative_error(unit.shard()) for unit, gatherer in pairs]
        total = sum(whole for _, whole in squares)
        return collect(
            self._collectives.reducers,
            replicas=self._collectives.replica_reducers,
            parameter_bytes=(
                sum(g.wire_bytes for g in gatherers),
                sum(g.dense_bytes for g in gatherers),
                sum(g.inside_bytes for g in gatherers),
            ),
            parameter_error=(sum(e for e, _ in squares) / total) ** 0.5 if total else 0.0,
            noise_factor=math.nan if self._noise is None else self._noise.mean(),
            tuning=self._plan.policy.tuning,
        )

    @property
    def reducers(self) -> Sequence[UnitReducer]:
        """What reduces each unit's gradients, to look at; not a part of the stable interface."""
        return self._collectives.reducers

    @property
    def gatherers(self) -> Sequence[UnitGatherer]:
        """What gathers each unit's parameters, likewise; empty where that is left to FSDP."""
        return self._collectives.gatherers

    @property
    def replica_reducers(self) -> Sequence[UnitReducer]:
        """What averages each unit's gradients over replicas, likewise; empty without replicas."""
        return self._collectives.replica_reducers

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Those of the ranks that share the model, likewise."""
        return self._groups

    @property
    def wire_bytes(self) -> int:
        """Gradient bytes that this rank sent so far in reduce-scatters; to other hosts, where ranks
        of a host add up first. Free to ask for in every step."""
        return sum(reducer.wire_bytes for reducer in self._collectives.reducers)

    @property
    def parameter_wire_bytes(self) -> int:
        """Bytes that this rank sent so far in all-gathers; to other hosts, where those of a host
        hand them on; 0 where the policy leaves them to FSDP."""
        return sum(gatherer.wire_bytes for gatherer in self._collectives.gatherers)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state between two steps: copies of all residuals, by parameter, and what
        else the next step depends on. Waits for the device; no collective.

        All values are tensors, with names that say whose state it is: number of ranks, policy,
        plan and rank. (``torch.distributed.checkpoint`` takes tensors of equal names on several
        ranks for copies of one.)

        Raises:
            ValueError: if a parameter is sharded in a way that has no such state.
            RuntimeError: if gradients of micro-batches wait inside hosts or replicas.
        """
        state = self._state()
        return to_state_dict(state.header(), state.take())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, force: bool = False) -> None:
        """Go on where ``state_dict`` was taken, by the same rank of as many. Call it on all ranks.

        Args:
            force: take also what was saved with another policy, and drop what has no place.

        Raises:
            tagc.StateError: if the state is not valid, of another policy, another number of ranks
                (see :meth:`load`), or something would be dropped; nothing was changed.
            RuntimeError: likewise, but on another rank, or the ranks' states differ.
        """
        self._load(lambda: OneRank(state_dict), force=force)

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
        self._load(lambda: open_folder(Path(folder), key), force=force)

    def _load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        self._state().load(open_source, force=force)
        measures = any(reducer.gauge is not None for reducer in self._collectives.all_reducers)
        if measures and self._noise is None and not self._disabled:
            warn(
                "the run that saved this state measured the codecs' noise. If it called "
                "compressor.keep_rates(optimizer), call that here, too; clip_grad_norm_ goes on"
            )
        if self._disabled:
            # Nobody will be told what changes from now on.
            self.refresh()

    def _state(self) -> State:
        made = self._collectives
        reduced = [
            UnitState(
                direction=reducer.plan.direction,
                reducer=reducer,
                shard=unit.group.rank(),
                shards=unit.group.size(),
                replica=made.replica,
            )
            for reducers in (made.reducers, made.replica_reducers)
            for unit, reducer in zip(self._units, reducers, strict=bool(reducers))
        ]
        parallel = [group for unit in self._units for group in unit.parallel]
        groups = list({id(group): group for group in (*self._groups, *parallel)}.values())
        return State(
            plan=self._plan,
            groups=groups,
            reduced=reduced,
            gathered=made.gatherers,
            waiting=made.waiting,
        )

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
        for reducer in self._collectives.all_reducers:
            reducer.rescale(factor)

    def copy_residuals(self) -> list[Tensor]:
        """What this rank owes now, and what codecs remember, for :meth:`restore_residuals`; as much
        memory again as the residuals take, and a little."""
        return copy_step_state(self._collectives.all_reducers)

    def restore_residuals(self, copy: Sequence[Tensor], where: bool | Tensor = True) -> None:
        """Owe again what :meth:`copy_residuals` saw: after a step that the optimizer skipped,
        as if that step had not been. Without it, what the step's finite gradients and older
        residuals sent is lost with the step. Call it on all ranks, with the same ``where``.

        Given a number, the next step is the one that would have come without the skipped one, to
        the bit: thresholds, supports, measured leads, seeds of stochastic rounding and of hashes
        are restored, too. Given a tensor, only residuals and measured leads are: the host counts
        steps and cannot know that one was skipped. Then thresholds keep what they learnt, and seeds
        go on. Bytes, reductions (for the warm-up and metrics) and measured noise keep counting.

        Args:
            where: restore only if true, a number or a tensor ``[]``, which is not looked at: no
                waiting. A tensor needs memory for one more residual for a moment.

        Raises:
            ValueError: if the copy is of another model or plan.
        """
        restore_step_state(self._collectives.all_reducers, copy, where)

    def keep_rates(self, optimizer: Optimizer, *, second_moment: bool | None = None) -> KeptRates:
        """Let ``optimizer`` take steps as large as with dense gradients, at the learning rates and
        with the decay that it has, whatever noise the policy's codecs add.

        An optimizer that divides by the root of a gradient's mean square, as Adam does, takes
        smaller steps where gradients are noisier. From now on tagc measures by how much they are,
        segment by segment, on a sample of their elements; ranks exchange a few numbers now and
        then; and in every step of the optimizer the rates of its parameter groups are multiplied
        by that factor (and AdamW's decay is divided by it), and are afterwards what they were. A
        schedule goes on as it does. Optimizers that divide by no such thing (SGD, Muon, Lion) are
        left as they are. Call it on all ranks, after ``tagc.wrap`` and before loading a state,
        which then has the factors, too.

        A group has one factor, the mean of its parameters': let those that stay dense (norms,
        biases) have a group of their own, as they do where they have no decay.

        Args:
            second_moment: whether it divides so; by default that is known of torch's optimizers,
                and of any that is called Adam.

        Returns:
            What ends it with ``remove()``, and has the ``factors`` of the last step.

        Raises:
            ValueError: if it is not known whether the optimizer divides so; or if it has these
                hooks already.
        """
        if any(kept.of(optimizer) for kept in self._kept):
            raise ValueError("this optimizer's rates are kept already; remove() that first")
        kept = KeptRates(optimizer, self._measured_noise(), second_moment=second_moment)
        self._kept.append(kept)
        return kept

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all parameters so that the norm which they would have without the
        codecs' noise is at most ``max_norm``, in place of ``torch.nn.utils.clip_grad_norm_``: a
        limit means what it meant for dense gradients. Call it on all ranks, between backward and
        the optimizer's step; from the first call on noise is measured, as for :meth:`keep_rates`.

        Returns:
            That norm, estimated; ``[]``.
        """
        return clip_grad_norm(self._model, self._measured_noise(), max_norm)

    def _measured_noise(self) -> NoiseFactors:
        if self._noise is None:
            made = self._collectives
            replicas = made.replica_reducers or [None] * len(made.reducers)
            reduced = (
                [] if self._disabled else zip(self._units, made.reducers, replicas, strict=False)
            )
            units = [
                MeasuredUnit(unit=unit, reducers=tuple(r for r in pair if r is not None))
                for unit, *pair in reduced
                if not self._disabled
            ]
            self._noise = NoiseFactors(units, made.replica_group)
        return self._noise

    def refresh(self) -> None:
        """Send all parameters whole and as they are in the next forward, where the policy sends
        changes only (codec ``delta``). Call it on all ranks, whenever parameters are changed by
        other means than an optimizer: weights loaded from a checkpoint, an average swapped in for
        an evaluation and out again.
        """
        for gatherer in self._collectives.gatherers:
            gatherer.refresh()

    def drop_waiting(self) -> None:
        """Forget the gradients of micro-batches that wait inside their hosts, or with ``replicas=``
        in their replica (``set_requires_all_reduce(False)``): ``zero_grad()`` does not know of
        them. Call it on all ranks, where a step is given up in its middle.
        """
        for waiting in self._collectives.waiting:
            waiting.drop()

    def remove(self) -> None:
        """Give FSDP its own collectives back and drop all residuals. The model may be wrapped
        again afterwards."""
        for kept in self._kept:
            kept.remove()
        for unit in self._units:
            unit.restore()
        self._collectives.clear()
        if attached(self._model) is self:
            delattr(self._model, _ATTRIBUTE)


def compressor(model: nn.Module) -> Compressor:
    """The compressor of a wrapped model.

    Raises:
        ValueError: if the model is not wrapped.
    """
    found = attached(model)
    if found is None:
        raise ValueError("this model is not wrapped: call tagc.wrap(model, policy=...) first")
    return found


def attach(model: nn.Module, handle: Compressor) -> None:
    """Leave the handle on the model, where :func:`compressor` finds it."""
    object.__setattr__(model, _ATTRIBUTE, handle)


def attached(model: nn.Module) -> Compressor | None:
    """The compressor of a model; None if it is not wrapped."""
    return getattr(model, _ATTRIBUTE, None)
