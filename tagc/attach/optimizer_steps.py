"""Notes which units' parameters an optimizer has changed; all ranks see the same steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tagc.attach.unit import Unit
from tagc.basics.tracing import untraced
from tagc.collect import CopyGatherer


class OptimizerSteps:
    """Notifies gatherers of the steps of every ``torch.optim.Optimizer`` that holds their
    parameters, until it is closed or garbage-collected.

    It also notifies them when a step begins, so that all ranks know of a step that raises on some
    of them, and at every call of a closure, because optimizers like LBFGS move weights between
    calls.
    """

    def __init__(self, pairs: Sequence[tuple[Unit, CopyGatherer]]) -> None:
        self._pairs = list(pairs)
        mine = weakref.ref(self)

        @untraced
        def note(optimizer: Optimizer, *, ended: bool) -> None:
            steps = mine()
            if steps is not None:
                steps._note(optimizer, ended=ended)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            note(optimizer, ended=False)
            return _with_noting_closure(lambda: note(optimizer, ended=False), args, kwargs)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            note(optimizer, ended=True)

        handles = (
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        )
        self._closers = [weakref.finalize(self, handle.remove) for handle in handles]

    def close(self) -> None:
        """Stop listening."""
        for close in self._closers:
            close()

    def _note(self, optimizer: Optimizer, *, ended: bool) -> None:
        # Looked up every time: after a load with `assign`, FSDP has other parameters, perhaps only
        # some of them.
        held = {id(p): gatherer for unit, gatherer in self._pairs for p in unit.trainable()}
        params = (id(p) for group in optimizer.param_groups for p in group["params"])
        for gatherer in {held[p]: None for p in params if p in held}:
            gatherer.note_step(ended=ended)


def _with_noting_closure(
    note: Callable[[], None], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments ``(optimizer, closure)`` of a step, with a closure that calls ``note`` first;
    None without a closure."""

    def noting(argument: Any) -> Any:
        if not callable(argument):
            return argument

        @wraps(argument)
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            note()
            return argument(*call_args, **call_kwargs)

        return call

    if not any(map(callable, (*args[1:], *kwargs.values()))):
        return None
    return (*args[:1], *map(noting, args[1:])), {k: noting(v) for k, v in kwargs.items()}
