"""The handle on a model that is trained in several sites."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tagc.basics.tracing import untraced
from tagc.basics.warn import warn
from tagc.checkpoint import Source, State, UnitState
from tagc.handle.compressor import Handle
from tagc.ops.fingerprint import fingerprint
from tagc.plan import Plan, format_bytes
from tagc.site.exchange import SiteExchange

# An attribute of the model, so that both are freed together.
_ATTRIBUTE = "_tagc_sites"


@dataclass(frozen=True, kw_only=True)
class SiteMetrics:
    """Counts of one rank since ``tagc.sites``. ``str(metrics)`` is a table, :meth:`as_dict` is for
    loggers.

    Attributes:
        steps: optimizer steps, without those at a learning rate of 0.
        exchanges: exchanges of a fragment that were applied.
        wire_bytes: bytes that this rank sent to other sites.
        dense_bytes: bytes that an all-reduce of the gradients between sites in every optimizer step
            would have sent, in float32.
        waited: exchanges that training waited for; without delay, all.
        wait_seconds: how long it waited.
        failed: attempts to exchange that did not count, because a site died or did not answer.
        healed: how often this site continued from another one, also when it joined.
        residual_norm: Euclidean norm of this rank's residuals now.
    """

    steps: int
    exchanges: int
    wire_bytes: int
    dense_bytes: int
    waited: int
    wait_seconds: float
    failed: int
    healed: int
    residual_norm: float

    def as_dict(self) -> dict[str, float]:
        """All values by name, for loggers: ``wandb.log(metrics.as_dict())``."""
        return asdict(self)

    def __str__(self) -> str:
        ratio = f" ({self.dense_bytes / self.wire_bytes:.0f}x)" if self.wire_bytes else ""
        trouble = f", {self.failed} attempts failed" if self.failed else ""
        trouble += f", continued from another site {self.healed} times" if self.healed else ""
        return (
            f"steps {self.steps}, exchanges {self.exchanges}{trouble}\n"
            f"sent {format_bytes(self.wire_bytes)}; gradients in every step would be "
            f"{format_bytes(self.dense_bytes)}{ratio}\n"
            f"waited for {self.waited} exchanges, {self.wait_seconds:.2f} s\n"
            f"residual norm {self.residual_norm:.3g}"
        )


def sites_of(model: nn.Module) -> Sites | None:
    """The handle on a model that is trained in sites; None if it is not."""
    return getattr(model, _ATTRIBUTE, None)


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
        optimizers: Sequence[Optimizer],
        exchange: SiteExchange,
        groups: Sequence[dist.ProcessGroup],
        release: Callable[[], None],
    ) -> None:
        """Exchange as the last of the optimizers steps. Steps at a learning rate of 0 do not count:
        torch's ``get_state_dict`` takes one to make a new optimizer's state.

        Args:
            groups: the groups of the ranks that share the model, in all sites.
            release: frees the group of exchanges in flight, if they have one.
        """
        self._model, self._exchange = model, exchange
        self._groups, self._release, self._removed = groups, release, False
        self._loads = _Loads(model, exchange)
        self._last = weakref.ref(optimizers[-1])
        self._given = weakref.WeakSet(optimizers)
        # How many steps of these optimizers have begun; and the steps of all optimizers that have
        # not ended, each with that count before it.
        self._begun = 0
        self._open: list[tuple[int, int]] = []
        before, after, before_any, after_any = (
            untraced(_Hook(method))
            for method in (self._before_step, self._after_step, self._before_any, self._after_any)
        )
        self._hooks: list[Any] = list(self._loads.hooks)
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before))
            self._hooks.append(optimizer.register_step_post_hook(after))
        everywhere = (
            register_optimizer_step_pre_hook(before_any),
            register_optimizer_step_post_hook(after_any),
        )
        for handle in everywhere:
            weakref.finalize(self, handle.remove)
        self._hooks += everywhere
        object.__setattr__(model, _ATTRIBUTE, self)

    def _before_any(self, optimizer: Optimizer) -> None:
        self._open.append((id(optimizer), self._begun))
        self._begun += optimizer in self._given

    def _after_any(self, optimizer: Optimizer) -> None:
        begun = self._begun
        while self._open:  # one that raised may be left
            one, begun = self._open.pop()
            if one == id(optimizer):
                break
        given = {id(one) for one in self._given}
        if begun != self._begun or any(one in given for one, _ in self._open):
            return  # it is given, or steps those that are, or one of them steps it
        held = set(map(id, self._model.parameters()))  # a load may have put others in their places
        for anchor in self._exchange.anchors:
            held.update(map(id, anchor.unit.held()))
        groups = [group for group in optimizer.param_groups if _moves(group)]
        stepped = (p for group in groups for p in group["params"] if p.grad is not None)
        if any(id(param) in held for param in stepped):
            raise ValueError(
                f"{type(optimizer).__name__}.step() changed parameters that sites exchange, but "
                "tagc.sites was not given this optimizer, so nothing would ever be exchanged: give "
                "it all optimizers of the model; if this one replaces another, call exchange() and "
                "remove() before its first step, and tagc.sites again with it"
            )

    def _before_step(self, optimizer: Optimizer) -> None:
        if _counts(optimizer):
            self._loads.settle(begins=True)

    def _after_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._last() and _counts(optimizer):
            self._exchange.step()
            self._loads.note_step()
        else:
            self._loads.note_writes()

    @property
    def _plan(self) -> Plan:
        return self._exchange.plan

    @property
    def sites(self) -> int:
        """Number of sites; with a ``torchft.Manager``, of the last exchange."""
        return self._exchange.sites

    @property
    def exchange_state(self) -> SiteExchange:
        """The anchors and the schedule, for inspection; not part of the stable interface."""
        return self._exchange

    def metrics(self) -> SiteMetrics:
        """This rank's counts since ``tagc.sites``. Waits for the device, and for an exchange in
        flight; no collective."""
        self._exchange.settle()
        reducers = [anchor.reducer for anchor in self._exchange.anchors]
        dense = sum(r.plan.dense_bytes(r.plan.buffer_columns) for r in reducers)
        norms = [
            torch.linalg.vector_norm(residual.float(), dtype=torch.float64).item()
            for reducer in reducers
            for residual in (*reducer.residuals.values(), *reducer.owner_residuals.values())
        ]
        return SiteMetrics(
            steps=self._exchange.steps,
            wire_bytes=sum(r.wire_bytes for r in reducers),
            dense_bytes=int(dense * self._exchange.steps),
            residual_norm=math.hypot(*norms),
            **vars(self._exchange.counts),
        )

    def exchange(self) -> None:
        """Exchange all parameters now, as at the end of training. Call it on all ranks, between two
        steps. All sites then have the same parameters, whatever the policy's ``alpha``.

        Raises:
            ValueError: after :meth:`remove`.
            RuntimeError: if the sites have different anchors, or a site does not answer in time;
                with a ``torchft.Manager`` :class:`tagc.SitesLostError`, if there is no quorum.
        """
        self._check_there()
        self._loads.settle(begins=True)
        self._exchange.exchange_all()
        self._loads.note_step()

    def refresh(self) -> None:
        """Go on from the parameters as they are now, as if ``tagc.sites`` were called anew: drop
        outer momentum, residuals and what is in flight. Call it on all ranks of all sites, between
        two steps, after something other than an optimizer or ``load_state_dict`` has replaced
        parameters: those two need no call.

        Raises:
            ValueError: after :meth:`remove`.
        """
        self._check_there()
        self._exchange.refresh()
        self._loads.note_writes()

    def remove(self) -> None:
        """Stop exchanging, and drop anchors and residuals. Waits for an exchange in flight, and
        does not apply it. The parameters stay as they are. Call it on all ranks; a second call does
        nothing. Until you call ``shutdown()`` of a ``torchft.Manager``, the other sites wait for
        this one.

        Raises:
            Exception: what the exchange in flight raised. The sites are removed then, too.
        """
        if self._removed:
            return
        self._removed = True
        for hook in self._hooks:
            hook.remove()
        if sites_of(self._model) is self:
            delattr(self._model, _ATTRIBUTE)
        try:
            self._exchange.release()
        finally:
            for anchor in self._exchange.anchors:
                anchor.reducer.release()
            self._release()

    def _check_there(self) -> None:
        if self._removed:
            raise ValueError("these sites were removed: call tagc.sites again, and use its handle")

    def _load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        super()._load(open_source, force=force)
        self._loads.note_state()

    def _state(self) -> State:
        self._check_there()
        self._loads.settle()
        self._exchange.settle()
        return State(
            plan=self._plan,
            groups=self._groups,
            reduced=[
                UnitState(
                    direction=anchor.reducer.plan.direction,
                    reducer=anchor.reducer,
                    shard=anchor.unit.shard,
                    shards=anchor.unit.shards,
                    replica=anchor.unit.group.rank(),
                    shared=anchor.shared,
                    owners=not self._exchange.elastic,
                )
                for anchor in self._exchange.anchors
            ],
            gathered=(),
            clock=self._exchange,
        )


class _Loads:
    """Notices that parameters were loaded after ``tagc.sites``, and makes them the anchors unless
    the anchors were loaded, too: otherwise they would pull the parameters back.

    Before the first step any change counts as a load; later what ``load_state_dict`` changed, of
    the model or a part of it. What else writes to parameters between steps (a clamp, a projection)
    is a part of training.
    """

    def __init__(self, model: nn.Module, exchange: SiteExchange) -> None:
        self._exchange = exchange
        self._trained, self._state_loaded, self._warned = False, False, False
        # The parameters before the first load since the last step.
        self._before: Tensor | None = None
        # Whose ``load_state_dict`` runs.
        self._loading: nn.Module | None = None
        self.note_writes()
        begins, ends = _Hook(self.note_load), _Hook(self.note_loaded)
        self.hooks = [m.register_load_state_dict_pre_hook(begins) for m in model.modules()]
        self.hooks += [m.register_load_state_dict_post_hook(ends) for m in model.modules()]

    def settle(self, *, begins: bool = False) -> None:
        """Go on from the parameters if they were loaded. Call it before anything depends on the
        anchors.

        Args:
            begins: whether a step or an exchange begins.
        """
        writes = self._count_writes()
        if not self._state_loaded:
            # A site that continues from another one has its anchors from there.
            fresh = not self._trained and not self._exchange.counts.healed
            # If averaged parameters were swapped in and out, that was no load.
            before = self._before
            if fresh or (before is not None and not torch.equal(before, self._marks())):
                self._exchange.refresh()
            elif self._trained and before is None and self._writes != writes and not self._warned:
                self._warned = True
                warn(
                    "tagc.sites: something other than an optimizer or load_state_dict wrote to "
                    "parameters between two steps, which counts as this site's training. If they "
                    "were loaded, call refresh() of the handle on all ranks of all sites"
                )
            self._before = None
        self._loading = None
        self._trained |= begins
        self._writes = writes

    def note_load(self, module: nn.Module) -> None:
        """Note that parameters of a module are about to be loaded."""
        if self._loading is None:
            self._loading = module
        if self._before is None:
            self._before = self._marks()

    def note_loaded(self, module: nn.Module) -> None:
        """Note that a load ended. If it swapped the parameters back in, what else writes to them
        before the next step is no load."""
        if module is not self._loading:
            return
        self._loading = None
        if self._before is not None and torch.equal(self._before, self._marks()):
            self._before = None
            self.note_writes()

    def note_state(self) -> None:
        """Note that anchors were loaded: what parameters hold until the next step belongs to
        them."""
        self._state_loaded = self._trained = True

    def note_step(self) -> None:
        """Note a step, and the exchanges after it, in which another site may send parameters."""
        self._state_loaded, self._before = False, None
        self.note_writes()

    def note_writes(self) -> None:
        """Note that what was written to parameters so far was training, or is dealt with."""
        self._writes = self._count_writes()

    def _marks(self) -> Tensor:
        return torch.stack([fingerprint(a.unit.read()) for a in self._exchange.anchors])

    def _count_writes(self) -> int:
        return sum(anchor.unit.writes for anchor in self._exchange.anchors)


class _Hook:
    """A hook of a module or an optimizer, which calls a method with it while that lives."""

    def __init__(self, method: Callable[[Any], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, caller: nn.Module | Optimizer, *args: Any) -> None:
        if (method := self._method()) is not None:
            method(caller)

    def __reduce__(self) -> Any:
        # In a copy of the model, also a pickled one, a function that does nothing.
        return getattr, (nullcontext(), "__exit__")


def _counts(optimizer: Optimizer) -> bool:
    """Whether any learning rate is not 0. To read one on a GPU would wait; that of torch's step is
    on the CPU, unless the default device is another one."""
    return any(map(_moves, optimizer.param_groups))


def _moves(group: Mapping[str, Any]) -> bool:
    rate = group.get("lr")
    return (isinstance(rate, Tensor) and rate.device.type != "cpu") or bool(rate != 0)
