"""The handle that ``tagc.wrap`` leaves on a model: plan, metrics, checkpoints, learning rates. That
of ``tagc.sites`` has plan and checkpoints in common with it."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tagc.attach import Unit, distinct
from tagc.basics.warn import warn
from tagc.checkpoint import (
    Source,
    State,
    UnitState,
    from_state_dict,
    open_folder,
    save_folder,
    to_state_dict,
)
from tagc.collect import UnitGatherer
from tagc.groups.mesh import live_groups
from tagc.handle.collectives import Collectives
from tagc.handle.metrics import Metrics, collect
from tagc.handle.noise import LearningRateScaling, NoiseFactors, clip_grad_norm
from tagc.plan import Plan, UnitInfo


class Handle(ABC):
    """A plan, and a state for checkpoints. It is ``Stateful``: put it into the state dict of
    ``torch.distributed.checkpoint`` beside model and optimizer."""

    _plan: Plan

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # The model holds its handle. A copy of the model, also a pickled one, is a plain model.
        return type(None), ()

    def plan(self) -> Plan:
        """The plan for every parameter. Print it to read it."""
        return self._plan

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's state between two steps: copies on the host of all residuals, by parameter,
        and of everything else that determines the next step. Waits for the device; no collective.

        All values are tensors. Their names contain the number of ranks, policy, plan and rank,
        because ``torch.distributed.checkpoint`` treats tensors with equal names on several ranks as
        copies of one.

        Raises:
            ValueError: if the state does not support the way in which a parameter is sharded.
            RuntimeError: if gradients of micro-batches wait inside hosts or replicas.
        """
        state = self._state()
        return to_state_dict(state.header(), *state.take())

    def load_state_dict(self, state_dict: Mapping[str, Any], *, force: bool = False) -> None:
        """Continue from ``state_dict``, taken by the same rank of the same number of ranks. Call it
        on all ranks.

        Args:
            force: also load a state of another policy, and drop the parts that do not fit.

        Raises:
            tagc.StateError: if the state is not valid, is of another policy or another number of
                ranks (see :meth:`load`), or part of it would be dropped. Nothing has changed then.
            RuntimeError: if that happened on another rank, or the ranks' states differ.
        """
        self._load(lambda: from_state_dict(state_dict), force=force)

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
        residuals of every parameter are redistributed and keep their sum over ranks; thresholds and
        counters start again.

        Args:
            key: the compressor's key in the state dict of a ``torch.distributed.checkpoint``.
            force: also load a state of another policy, and drop, with a warning, the parts that do
                not fit.

        Raises:
            tagc.StateError: if there is no valid state, it is of another policy, or part of it
                would be dropped. Nothing has changed then.
            RuntimeError: if that happened on another rank, or the ranks' states differ.
        """
        self._load(lambda: open_folder(Path(folder), key), force=force)

    @abstractmethod
    def _state(self) -> State:
        """The state of this rank."""

    def _load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        self._state().load(open_source, force=force)


_FLOAT32 = torch.finfo(torch.float32)
# An attribute of the model, so that both are freed together.
_ATTRIBUTE = "_tagc_compressor"


class Compressor(Handle):
    """Handle on a wrapped model; get it with :func:`tagc.compressor`.

    It is ``Stateful``: put it into the state dict of ``torch.distributed.checkpoint`` beside model
    and optimizer. A resumed run then has the same bits as one that never stopped. Or ``save`` and
    ``load`` a folder of safetensors files.

    Attributes:
        units, groups: the model's units, and the process groups of the ranks that share the model;
            this and the rest is for inspection, and not part of the stable interface.
        reducers, replica_reducers, gatherers: of each unit; empty if the plan has no replicas, or
            FSDP gathers parameters itself.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        collectives: Collectives,
        groups: list[dist.ProcessGroup],
        *,
        disabled: bool = False,
    ) -> None:
        self._model, self._plan, self._disabled = model, plan, disabled
        self.units, self.groups = collectives.units, groups
        self._collectives = collectives
        self.reducers, self.replica_reducers = collectives.reducers, collectives.replica_reducers
        self.gatherers: Sequence[UnitGatherer] = collectives.gatherers
        # What CUDA graphs may hold.
        self._reducing = [] if disabled else collectives.all_reducers
        gatherers = [] if disabled else self.gatherers
        self._gathering = list(zip(self.units, gatherers, strict=bool(gatherers)))
        self._parts = [*(gatherer for _, gatherer in self._gathering), *self._reducing]
        self._noise: NoiseFactors | None = None
        # Weak: an optimizer that is no longer used takes its state with it.
        self._kept: WeakSet[LearningRateScaling] = WeakSet()

    def metrics(self) -> Metrics:
        """This rank's counts since ``tagc.wrap``. Waits for the device; no collective."""
        self._installed()
        noise = math.nan if self._noise is None else self._noise.mean()
        made = self.reducers, self.replica_reducers, self._gathering
        return collect(self._plan, *made, noise_factor=noise)

    @property
    def has_replicas(self) -> bool:
        """Whether gradients are averaged over replicas of the sharded model."""
        return self._collectives.replica_group is not None

    @property
    def wire_bytes(self) -> int:
        """Gradient bytes that this rank has sent in reduce-scatters. If the ranks of a host add up
        first, only bytes to other hosts count. Reading it does not wait for the device."""
        return sum(reducer.wire_bytes for reducer in self.reducers)

    @property
    def parameter_wire_bytes(self) -> int:
        """Bytes that this rank has sent in all-gathers; 0 if the policy leaves parameters to FSDP.
        If the ranks of a host pass parameters on, only bytes to other hosts count."""
        return sum(gatherer.wire_bytes for gatherer in self.gatherers)

    def _load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        super()._load(open_source, force=force)
        measures = any(reducer.gauge is not None for reducer in self._collectives.all_reducers)
        if measures and self._noise is None and not self._disabled:
            warn(
                "the run that saved this state measured the codecs' noise. If it called "
                "compressor.keep_rates(optimizer), call it here too; clip_grad_norm_ needs nothing"
            )
        if self._disabled:
            # From now on no gatherer sees changes of the parameters.
            self.refresh()

    def _state(self) -> State:
        made = self._installed()
        replica = 0 if made.replica_group is None else made.replica_group.rank()
        reduced = [
            UnitState(
                direction=reducer.plan.direction,
                reducer=reducer,
                **_shard_of(unit, reducer.plan.info, replica),
            )
            for reducers in (self.reducers, self.replica_reducers)
            for unit, reducer in zip(self.units, reducers, strict=bool(reducers))
        ]
        parallel = [group for unit in self.units for group in unit.parallel]
        return State(
            plan=self._plan,
            groups=distinct([*self.groups, *parallel]),
            reduced=reduced,
            gathered=self.gatherers,
            waiting=made.waiting,
        )

    def scale_residuals(self, factor: float | Tensor) -> None:
        """Rescale residuals and thresholds after a change of the loss scale.

        Residuals have the scale of the gradients that FSDP reduces, which a loss scaler multiplies.
        A power of two changes only exponents. Call it between two steps, on every rank with the
        same factor. The next reduction raises if a rank did not, or with another number.

        Args:
            factor: the new loss scale divided by the old one, positive and finite in float32; or a
                tensor ``[]`` on the residuals' device. The host does not read the tensor, so it
                does not wait for the device.

        Raises:
            ValueError: if the factor is a number that is not positive and finite in float32, or a
                tensor of several. Nothing has changed then.
        """
        if isinstance(factor, Tensor):
            if factor.numel() != 1:
                raise ValueError(f"the factor must be one number, got {list(factor.shape)}")
        elif not _FLOAT32.tiny <= factor <= _FLOAT32.max:
            raise ValueError(f"the factor must be positive and finite in float32, got {factor}")
        self._note("scale_residuals", factor)
        for reducer in self._collectives.all_reducers:
            reducer.rescale(factor)

    def copy_residuals(self) -> list[Tensor]:
        """A copy of this rank's residuals and of the codecs' state, for :meth:`restore_residuals`.
        It takes a little more memory than the residuals."""
        reducers = self._installed().all_reducers
        return [tensor.clone() for reducer in reducers for tensor in reducer.step_tensors()]

    def restore_residuals(self, copy: Sequence[Tensor], where: bool | Tensor = True) -> None:
        """Restore the residuals from :meth:`copy_residuals`, after the optimizer skipped a step.
        Without it, the part of the gradients and residuals that was sent in that step is lost.
        Call it on all ranks, with the same ``where``.

        If ``where`` is a bool, the next step has the same bits as without the skipped one:
        thresholds, supports and the seeds of stochastic rounding and hashes are also restored. If
        it is a tensor, only residuals are restored, because the host cannot know that a step was
        skipped: thresholds keep their values, and seeds advance. In both cases bytes, reductions
        (for the warm-up and metrics) and measured noise keep counting.

        Args:
            where: restore only if true; a bool, or a tensor ``[]``. The host does not read the
                tensor, so it does not wait. A tensor briefly needs memory for one more residual.

        Raises:
            ValueError: if the copy is of another model or plan.
        """
        reducers = self._installed().all_reducers
        shapes = [tensor.shape for reducer in reducers for tensor in reducer.step_tensors()]
        if shapes != [tensor.shape for tensor in copy]:
            raise ValueError("the copy was not taken from this model under this plan")
        kept = iter(copy)
        for reducer in reducers:
            reducer.restore_step([next(kept) for _ in reducer.step_tensors()], where)
        self._note("restore_residuals", where)

    def keep_rates(
        self, optimizer: Optimizer, *, second_moment: bool | None = None
    ) -> LearningRateScaling:
        """Make the steps of ``optimizer`` as large as with dense gradients, at its own learning
        rates and decay, despite the noise of the policy's codecs.

        An optimizer that divides by the root mean square of a gradient, such as Adam, takes smaller
        steps if gradients are noisier. From now on tagc measures the factor for each segment, on a
        sample of its elements. Ranks exchange a few numbers now and then. For each step of the
        optimizer, tagc cuts its parameter groups into parts of about the same factor, multiplies
        their rates by it and divides AdamW's decay by it; afterwards it restores the groups.
        Parameters that stay uncompressed keep their rate. Schedules are not affected. Optimizers
        without a second moment (SGD, Muon, Lion) are left alone; tagc warns if Muon or Lion gets
        gradients in 1 bit. Call it on all ranks, after ``tagc.wrap`` and before you load a
        state, which then includes the factors.

        Args:
            second_moment: whether the optimizer divides by a second moment. If None, tagc decides
                for torch's optimizers and for any optimizer whose class name contains "Adam" and
                not "Muon".

        Returns:
            An object with the ``factors`` of the last step, a mean for each parameter group, and
            with ``remove()``, which leaves the optimizer alone again.

        Raises:
            ValueError: if tagc cannot tell whether the optimizer has a second moment, if its rates
                are already kept, for this model or another, if it steps other optimizers, or none
                of this model's parameters.
        """
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"keep_rates needs a torch.optim.Optimizer, not {optimizer!r:.80}")
        noise = self._measured_noise()
        known = noise.by_parameter()
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        if known and known.keys().isdisjoint(held):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter whose gradients tagc reduces: make "
                "it after the model is sharded, and give keep_rates the optimizer that steps those"
            )
        kept = LearningRateScaling(optimizer, noise, second_moment=second_moment)
        self._kept.add(kept)
        return kept

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients by an estimate of their norm without the codecs' noise, so ``max_norm``
        means the same as for dense gradients. Call it in place of
        ``torch.nn.utils.clip_grad_norm_``, on all ranks, between backward and the optimizer's step.
        From the first call on, tagc measures noise as for :meth:`keep_rates`.

        Returns:
            The estimated norm, ``[]``.

        Raises:
            ValueError: with FSDP1, which has its own ``clip_grad_norm_``.
        """
        return clip_grad_norm(self._model, self._measured_noise(), max_norm)

    def _measured_noise(self) -> NoiseFactors:
        made = self._installed()
        if self._noise is None:
            reducers = [] if self._disabled else [self.reducers, self.replica_reducers]
            measured = zip(*(some for some in reducers if some), strict=True)
            # None are measured if nothing is compressed.
            units = list(zip(self.units, measured, strict=False))
            self._noise = NoiseFactors(units, made.replica_group)
        return self._noise

    def refresh(self) -> None:
        """Send all parameters whole in the next forward, if the policy sends changes (codec
        ``delta``). Call it on all ranks whenever something other than an optimizer has changed
        parameters: after you load a checkpoint, or swap averaged weights in or out.
        """
        for gatherer in self._installed().gatherers:
            gatherer.refresh()

    @property
    def steps_before_capture(self) -> int:
        """Steps (forward and backward) that must still run before a CUDA graph can capture one:
        those of the warm-up (``plan().warmup_steps``) and one more, which makes what later ones
        use."""
        return max((part.steps_before_capture for part in self._parts), default=0)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph holds a step, so that :meth:`before_replay` comes next."""
        return any(reducer.captured for reducer in self._reducing)

    def before_capture(self) -> None:
        """Get ready for the capture of a CUDA graph that holds one forward and backward, and for
        the graph's first replay. Call it on all ranks right before the capture. FSDP2 only.

        A graph repeats its messages at the same addresses. What changes between steps happens here
        instead: changed parameters are sent if the policy sends changes (without overlap with the
        forward, and in a capture that is an error), feedback restarts, counts advance, and errors
        that the device found are raised. See docs/recipes.md.

        Raises:
            ValueError: if a graph cannot hold the collectives of this model and policy.
            RuntimeError: if :attr:`steps_before_capture` is not 0; or for an error that the device
                found.
        """
        self._installed()
        if not self._disabled and not all(unit.captures for unit in self.units):
            raise ValueError(
                "CUDA graphs can hold the collectives of tagc for FSDP2 only (fully_shard or "
                "replicate): train without a graph"
            )
        for dimension, rule in self._plan.policy.dimensions.items():
            if rule.codec.kind == "exact" and not self._disabled:
                raise ValueError(
                    f"with codec 'exact' the ranks of dimension {dimension!r} agree on the size of "
                    "every message, which a CUDA graph cannot hold: train without a graph, or "
                    "choose another codec"
                )
        if self.steps_before_capture:
            raise RuntimeError(
                f"tagc: {self.steps_before_capture} more steps must run without a CUDA graph "
                "before one can be captured (tagc.compressor(model).steps_before_capture)"
            )
        self._send_ahead()
        for unit, gatherer in self._gathering:
            if not gatherer.has_read:
                unit.send_ahead(gatherer)  # reads the copy, as the graph will
        for part in self._parts:
            part.before_capture()
        for group in live_groups():
            group.captured_bytes = (0, 0)

    def before_replay(self) -> None:
        """Get ready for a replay of the graph, but for the first one, which
        :meth:`before_capture` covers. Call it on all ranks before each of them. Without it, counts
        and checkpoints are wrong, and changed parameters are not sent, which makes the result NaN.

        Raises:
            RuntimeError: if no graph was captured; if a step would now do something else, as in a
                warm-up that was loaded; or for an error that the device found.
        """
        if self._reducing and not self.is_captured:
            raise RuntimeError(
                "tagc: no CUDA graph was captured since tagc.wrap, or since the last call of "
                "tagc.compressor(model).before_capture()"
            )
        for reducer in self._reducing:
            reducer.check_replay()
        self._send_ahead()
        for part in self._parts:
            part.before_replay()
        for group in live_groups():
            wire, dense = group.captured_bytes
            group.wire_bytes += wire
            group.dense_bytes += dense

    def _send_ahead(self) -> None:
        """End a round of flags, which the parts then check, and send the changes that are due: a
        graph repeats what it captured, and only reads copies."""
        for workspace in {part.store.workspace for part in self._parts}:
            workspace.before_graph()
        for unit, gatherer in self._gathering:
            if gatherer.sends_ahead:
                unit.send_ahead(gatherer)

    def drop_waiting(self) -> None:
        """Drop the gradients of micro-batches that wait inside hosts, or with ``replicas=`` inside
        replicas (``set_requires_all_reduce(False)``). Call it on all ranks if you abandon a step:
        ``zero_grad()`` does not drop them.

        Inside a replica the messages of these micro-batches are already sent: what they carried of
        residuals is dropped, too, unless you call :meth:`copy_residuals` before the step and
        :meth:`restore_residuals` after it. On hosts nothing else is lost.
        """
        self._note("drop_waiting", True)
        for waiting in self._collectives.waiting:
            waiting.drop()

    def _note(self, call: str, value: float | Tensor) -> None:
        """Note a call, which ranks compare in the next reduction. A tensor's value stays on its
        device, and is not compared."""
        text = f"{call} {'' if isinstance(value, Tensor) else float(value)}"
        for reducer in self._installed().all_reducers:
            reducer.note(text)

    def _installed(self) -> Collectives:
        """The collectives on the model. Raises ValueError if :meth:`remove` took them off."""
        if attached(self._model) is not self:
            raise ValueError(
                "this compressor was removed from its model, and has no state any more: use the "
                "new one, tagc.compressor(model), if you wrapped the model again, and else leave "
                "it out of checkpoints"
            )
        return self._collectives

    def remove(self) -> None:
        """Restore FSDP's own collectives and drop all residuals. You may wrap the model again,
        which makes a new compressor. This one then has no state any more: it raises ValueError.
        """
        if attached(self._model) is not self:
            return  # removed before; the collectives may be those of a later tagc.wrap
        for kept in self._kept:
            kept.remove()
        for unit in self.units:
            unit.restore()
        self._collectives.clear()
        delattr(self._model, _ATTRIBUTE)


def _shard_of(unit: Unit, info: UnitInfo, replica: int) -> dict[str, Any]:
    """This rank's shard of a unit. With DDP the ranks of a host share a replica."""
    if not info.replicated:
        return {"shard": unit.group.rank(), "shards": unit.group.size(), "replica": replica}
    host, place = divmod(unit.group.rank(), info.ranks_per_host)
    return {"shard": place, "shards": info.ranks_per_host, "replica": host}


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
