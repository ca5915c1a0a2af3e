"""Changes of a model's parameters that tagc must notice: steps of optimizers, and parameters that
are added or unfrozen after ``tagc.wrap``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tagc.attach.unit import Unit
from tagc.basics.tracing import untraced
from tagc.collect import CopyGatherer
from tagc.plan import as_list
from tagc.policy.roles import clean_name


class OptimizerSteps:
    """Notifies gatherers of the steps of every ``torch.optim.Optimizer`` that holds their
    parameters, until it is closed or garbage-collected. All ranks see the same steps.

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
            def noting(closure: Callable[..., Any]) -> Callable[..., Any]:
                @wraps(closure)
                def call(*call_args: Any, **call_kwargs: Any) -> Any:
                    note(optimizer, ended=False)
                    return closure(*call_args, **call_kwargs)

                return call

            note(optimizer, ended=False)
            return with_closure(noting, args, kwargs)

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


def with_closure(
    wrap: Callable[[Callable[..., Any]], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments ``(optimizer, closure)`` of a step, with the closure that ``wrap`` makes of the
    given one; None without a closure."""

    def wrapped(argument: Any) -> Any:
        return wrap(argument) if callable(argument) else argument

    if not any(map(callable, (*args[1:], *kwargs.values()))):
        return None
    return (*args[:1], *map(wrapped, args[1:])), {k: wrapped(v) for k, v in kwargs.items()}


class KnownParameters:
    """The parameters of a model as they are now. Once in every backward, compares them with then:
    the gradients of others would be reduced uncompressed, or not at all, in silence."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known = dict(model.named_parameters(remove_duplicate=False))
        # Each frozen parameter, and where its module has it or one in its place.
        self._frozen: dict[str, tuple[nn.Parameter, Mapping[str, nn.Parameter | None], str]] = {}
        self._note_frozen(model, self._known)
        self._at: tuple[int, int] | None = None
        self._look(model)

    def checker(self) -> Callable[[int], None]:
        """:meth:`check`, which does not keep this object alive: DDP holds its reducers where
        Python's garbage collector does not look."""
        mine = weakref.ref(self)

        def check(steps: int) -> None:
            known = mine()
            if known is not None:
                known.check(steps)

        return check

    def check(self, steps: int) -> None:
        """Raise RuntimeError if new parameters require a gradient. Call it before every reduction
        of a unit; later ones of a backward check nothing again. Outside of a backward, those with
        the same number of ``steps`` before them count as one."""
        backward = torch._C._current_graph_task_id()
        at = backward, steps if backward < 0 else 0
        if at == self._at:
            return
        self._at = at
        new = [
            name
            for name, (param, held, key) in self._frozen.items()
            if param.requires_grad or ((now := held.get(key)) is not None and now.requires_grad)
        ]
        model = self._model()
        if model is not None and not new and self._seen != self._structure():
            known = {id(param) for param in self._known.values()}
            new = [
                name
                for name, param in model.named_parameters()
                # FSDP may have put others in their places for the time of a backward.
                if param.requires_grad
                and (name in self._frozen or (name not in self._known and id(param) not in known))
            ]
            if not new:
                named = model.named_parameters(remove_duplicate=False)
                self._note_frozen(model, {name for name, _ in named} - self._known.keys())
                self._look(model)
        if new:
            self._at = None  # a reduction that is tried again raises, too
            names = as_list([clean_name(name) for name in new])
            raise RuntimeError(
                f"tagc: {names} got requires_grad, or joined the model, after tagc.wrap, so the "
                "plan does not know them: make such changes before the model is sharded (or put "
                "into DistributedDataParallel) and wrapped, or call "
                "tagc.compressor(model).remove() and tagc.wrap again"
            )

    def _note_frozen(self, model: nn.Module, names: Container[str]) -> None:
        """Note those of these parameters that are frozen."""
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, param in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if param is not None and not param.requires_grad and name in names:
                    self._frozen[name] = param, module._parameters, key

    def _look(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._seen = self._structure()

    def _structure(self) -> tuple[list[int], list[int]]:
        """Cheap enough for every step: which modules, and how many parameters each has. (FSDP
        exchanges the parameters themselves.)"""
        children = chain.from_iterable(map(dict.values, self._children))
        return [*map(id, children)], [*map(len, self._parameters)]
