"""The handle that ``tagc.wrap`` leaves on a model: what it counts, saves, loads and takes back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tagc.attach import Unit
from tagc.basics.warn import warn
from tagc.checkpoint import (
    OneRank,
    Source,
    State,
    UnitState,
    open_folder,
    save_folder,
    to_state_dict,
)
from tagc.collect import UnitGatherer, UnitReducer, copy_step_state, restore_step_state
from tagc.handle.collectives import Collectives
from tagc.handle.metrics import Metrics, collect
from tagc.handle.noise import KeptRates, MeasuredUnit, NoiseFactors, clip_grad_norm
from tagc.plan import Plan

# On the model itself, so that both are garbage together.
_ATTRIBUTE = "_tagc_compressor"


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
        """The plan for every parameter; print it."""
        return self._plan

    def metrics(self) -> Metrics:
        """Counts of this rank so far. Waits for the device; no collective."""
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
        """The reducer of each unit, for inspection; not part of the stable interface."""
        return self._collectives.reducers

    @property
    def gatherers(self) -> Sequence[UnitGatherer]:
        """The gatherer of each unit, likewise; empty if FSDP gathers parameters itself."""
        return self._collectives.gatherers

    @property
    def replica_reducers(self) -> Sequence[UnitReducer]:
        """The reducer over replicas of each unit, likewise; empty without replicas."""
        return self._collectives.replica_reducers

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """The process groups of the ranks that share the model, likewise."""
        return self._groups

    @property
    def wire_bytes(self) -> int:
        """Gradient bytes that this rank sent in reduce-scatters so far; only those to other hosts
        if the ranks of a host add up first. Costs nothing to read in every step."""
        return sum(reducer.wire_bytes for reducer in self._collectives.reducers)

    @property
    def parameter_wire_bytes(self) -> int:
        """Bytes that this rank sent in all-gathers so far; only those to other hosts if the ranks
        of a host pass them on; 0 if the policy leaves parameters to FSDP."""
        return sum(gatherer.wire_bytes for gatherer in self._collectives.gatherers)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state between two steps: copies of all residuals, by parameter, and of
        everything else that the next step depends on. Waits for the device; no collective.

        All values are tensors. Their names contain the number of ranks, policy, plan and rank,
        because ``torch.distributed.checkpoint`` treats tensors with equal names on several ranks as
        copies of one.

        Raises:
            ValueError: if a parameter is sharded in a way that has no such state.
            RuntimeError: if gradients of micro-batches wait inside hosts or replicas.
        """
        state = self._state()
        return to_state_dict(state.header(), state.take())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, force: bool = False) -> None:
        """Continue from ``state_dict``, taken by the same rank of the same number of ranks. Call it
        on all ranks.

        Args:
            force: also load a state of another policy, and drop what has no place.

        Raises:
            tagc.StateError: if the state is not valid, of another policy, another number of ranks
                (see :meth:`load`), or something would be dropped; nothing was changed.
            RuntimeError: likewise, but on another rank, or the ranks' states differ.
        """
        self._load(lambda: OneRank(state_dict), force=force)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state to a folder that all ranks share: one safetensors file per rank, with
        policy, plan, step and ranks as metadata. Call it on all ranks, between two steps.

        The previous save stays valid until all files are complete.

        Raises:
            OSError: if writing fails.
            tagc.StateError: if the ranks do not share the folder.
            RuntimeError: if that happened on another rank.
        """
        save_folder(Path(folder), self._state())

    def load(
        self, folder: str | os.PathLike[str], *, key: str = "tagc", force: bool = False
    ) -> None:
        """Load a state from a folder that :meth:`save` or ``torch.distributed.checkpoint`` wrote,
        on any number of ranks. Call it on all ranks.

        With the same ranks and plan the run continues as if it had never stopped. Otherwise the
        residuals of every parameter are redistributed, so that their sum over ranks stays the same,
        and thresholds and counters start again.

        Args:
            key: of the compressor in the state dict of a ``torch.distributed.checkpoint``.
            force: also load a state of another policy, and drop, with a warning, what has no place.

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
        """Rescale residuals and thresholds after a change of the loss scale: gradients are
        ``factor`` times as large from now on, the new scale divided by the old one.

        Residuals are in the units of the gradients that FSDP reduces, which a loss scaler
        multiplies. A power of two changes only exponents. Call it between two steps, on every rank
        with the same factor. A tensor is not read, so the host does not wait for the device.

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
        """A copy of this rank's residuals and of the codecs' state, for :meth:`restore_residuals`.
        It takes a little more memory than the residuals."""
        return copy_step_state(self._collectives.all_reducers)

    def restore_residuals(self, copy: Sequence[Tensor], where: bool | Tensor = True) -> None:
        """Restore the residuals from :meth:`copy_residuals`, after the optimizer skipped a step.
        Without it, the part of the gradients and residuals that was sent in that step is lost.
        Call it on all ranks, with the same ``where``.

        If ``where`` is a bool, the next step has the same bits as without the skipped one:
        thresholds, supports, measured leads and seeds of stochastic rounding and of hashes are
        restored, too. If it is a tensor, only residuals and measured leads are restored, because
        the host cannot know that a step was skipped. Then thresholds keep what they learnt, and
        seeds advance. Bytes, reductions (for the warm-up and metrics) and measured noise keep
        counting.

        Args:
            where: restore only if true; a bool, or a tensor ``[]``, which is not read, so the host
                does not wait. A tensor needs memory for one more residual for a moment.

        Raises:
            ValueError: if the copy is of another model or plan.
        """
        restore_step_state(self._collectives.all_reducers, copy, where)

    def keep_rates(self, optimizer: Optimizer, *, second_moment: bool | None = None) -> KeptRates:
        """Make the steps of ``optimizer`` as large as with dense gradients, at its own learning
        rates and decay, despite the noise of the policy's codecs.

        An optimizer that divides by the root mean square of a gradient, such as Adam, takes smaller
        steps if gradients are noisier. From now on tagc measures the factor for each segment, on a
        sample of its elements. Ranks exchange a few numbers now and then. For each step of the
        optimizer, tagc multiplies the rates of its parameter groups by that factor and divides
        AdamW's decay by it; afterwards it restores both. Schedules are not affected. Optimizers
        without a second moment (SGD, Muon, Lion) are left alone. Call it on all ranks, after
        ``tagc.wrap`` and before you load a state, which then includes the factors.

        A parameter group has one factor, the mean over its parameters. So put parameters that stay
        dense (norms, biases) into a group of their own, as is usual for those without decay.

        Args:
            second_moment: whether the optimizer divides by a second moment. By default tagc knows
                it for torch's optimizers, and for any that is called Adam.

        Returns:
            An object with ``remove()``, which ends this, and the ``factors`` of the last step.

        Raises:
            ValueError: if tagc cannot tell whether the optimizer has a second moment, or if its
                rates are kept already.
        """
        if any(kept.of(optimizer) for kept in self._kept):
            raise ValueError("this optimizer's rates are kept already; remove() that first")
        kept = KeptRates(optimizer, self._measured_noise(), second_moment=second_moment)
        self._kept.append(kept)
        return kept

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients by an estimate of their norm without the codecs' noise, in place of
        ``torch.nn.utils.clip_grad_norm_``. So ``max_norm`` means the same as for dense gradients.
        Call it on all ranks, between backward and the optimizer's step. From the first call on tagc
        measures noise, as for :meth:`keep_rates`.

        Returns:
            The estimated norm, ``[]``.
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
        """Send all parameters whole in the next forward, if the policy sends changes (codec
        ``delta``). Call it on all ranks whenever anything but an optimizer changes parameters: if
        you load a checkpoint, or swap an average in for an evaluation and out again.
        """
        for gatherer in self._collectives.gatherers:
            gatherer.refresh()

    def drop_waiting(self) -> None:
        """Drop the gradients of micro-batches that wait inside their hosts, or with ``replicas=``
        in their replica (``set_requires_all_reduce(False)``); ``zero_grad()`` does not drop them.
        Call it on all ranks if you abandon a step.
        """
        for waiting in self._collectives.waiting:
            waiting.drop()

    def remove(self) -> None:
        """Restore FSDP's own collectives and drop all residuals. You may wrap the model again."""
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
