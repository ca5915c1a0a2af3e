"""The handle on a model that is trained in several sites."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tagc.attach.sites import OwnGroup, SiteUnit
from tagc.basics.tracing import untraced
from tagc.checkpoint import Source, State, UnitState
from tagc.collect import SiteExchange
from tagc.handle.handle import Handle
from tagc.handle.site_links import SiteLinks
from tagc.handle.site_loads import SiteLoads
from tagc.handle.site_metrics import SiteMetrics, collect_of_sites
from tagc.plan import Plan

# An attribute of the model, so that both are freed together.
_ATTRIBUTE = "_tagc_sites"


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
        units: Sequence[SiteUnit],
        links: SiteLinks,
        exchange: SiteExchange,
        groups: list[dist.ProcessGroup],
        own: OwnGroup | None,
    ) -> None:
        self._model, self._units, self._links = model, units, links
        self._exchange, self._groups, self._own = exchange, groups, own
        self._hooks: list[Any] = []
        self._removed = False

    @property
    def _plan(self) -> Plan:
        return self._links.plan

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
        self._exchange.settle()  # which may make other reducers
        return collect_of_sites(self._links.collectives.reducers, self._exchange)

    def exchange(self) -> None:
        """Exchange all parameters now, as at the end of training. Call it on all ranks, between two
        steps. Unless the policy has an ``alpha``, all sites then have the same parameters.

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
        while self._hooks:
            self._hooks.pop().remove()
        self._loads.close()
        if sites_of(self._model) is self:
            delattr(self._model, _ATTRIBUTE)
        try:
            self._exchange.release()
        finally:
            self._links.collectives.clear()
            if self._own is not None:
                self._own.release()

    def _check_there(self) -> None:
        if self._removed:
            raise ValueError("these sites were removed: call tagc.sites again, and use its handle")

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Exchange as the last of these optimizers steps. Steps at a learning rate of 0 do not
        count: torch's ``get_state_dict`` takes one to make a new optimizer's state."""
        self._loads = SiteLoads(self._model, self._units, self._exchange)
        mine, last = weakref.ref(self), weakref.ref(optimizers[-1])

        @untraced
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            sites = mine()
            if sites is not None and _counts(optimizer):
                sites._loads.settle(begins=True)

        @untraced
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            sites = mine()
            if sites is None:
                return
            if optimizer is last() and _counts(optimizer):
                sites._exchange.step()
                sites._loads.note_step()
            sites._loads.note_writes()

        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before_step))
            self._hooks.append(optimizer.register_step_post_hook(after_step))
        object.__setattr__(self._model, _ATTRIBUTE, self)

    def _load(self, open_source: Callable[[], Source], *, force: bool) -> None:
        super()._load(open_source, force=force)
        self._loads.note_state()

    def _state(self) -> State:
        self._check_there()
        self._loads.settle()
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
                    owners=not self._exchange.elastic,
                )
                for unit, anchor in zip(self._units, anchors, strict=True)
            ],
            gathered=(),
            clock=self._exchange,
        )


def _counts(optimizer: Optimizer) -> bool:
    return any(_moves(group.get("lr")) for group in optimizer.param_groups)


def _moves(rate: float | Tensor | None) -> bool:
    """Whether a learning rate is not 0. To read one on a GPU would wait; that of torch's step is on
    the CPU, unless the default device is another one."""
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return True
    return bool(rate != 0)
