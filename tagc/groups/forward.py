"""Tells a process group whether it carries activations.

The group of a mesh's dimension also carries what must stay exact: a sharded parameter that
``full_tensor()`` gathers for a checkpoint, or what an optimizer gathers in its step. A group cannot
tell these from activations. So collectives are coded only while a backward runs, and in the forward
of a model given to :func:`compress_activations`, as :func:`tagc.wrap` does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import graph
from torch.utils import checkpoint

from tagc.basics.tracing import untraced

Model = TypeVar("Model", bound=nn.Module)


class _Marked(threading.local):
    """What was marked and runs in this thread."""

    def __init__(self) -> None:
        self.contexts = 0  # open `activations`
        # Frames in which torch calls marked models, which may call each other: the innermost last.
        self.calls: list[FrameType] = []


_marked = _Marked()
_MODULES, _CHECKPOINTS, _ENGINE = map(vars, (nn.modules.module, checkpoint, graph))


def in_forward() -> bool:
    """Whether this thread is in a forward that was marked."""
    _forget_ended()
    return bool(_marked.contexts or _marked.calls)


def in_backward() -> bool:
    """Whether this thread is in a backward."""
    return torch._C._current_graph_task_id() != -1


def in_recomputation() -> bool:
    """Whether this thread, in a backward, is in a forward that is computed once more."""
    for frame in _stack():
        if frame.f_globals is _ENGINE:
            return False
        if frame.f_globals is _MODULES or frame.f_globals is _CHECKPOINTS:
            return True
    return False


def _stack() -> Iterator[FrameType]:
    """The frames of this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _forget_ended() -> None:
    """Forget calls that have ended. torch calls no hook after a forward that KeyboardInterrupt or
    SystemExit ends, but then its frame is no longer on the stack."""
    if _marked.calls:
        running = set(_stack())
        _marked.calls = [call for call in _marked.calls if call in running]


@contextmanager
def activations() -> Iterator[None]:
    """Collectives in this context carry activations: for forwards that are no module's call."""
    _marked.contexts += 1
    try:
        yield
    finally:
        _marked.contexts -= 1


def _enter(*args: Any) -> None:
    # Frames of the compiler may lie in between.
    _marked.calls.append(next(frame for frame in _stack() if frame.f_globals is _MODULES))


def _leave(*args: Any) -> None:
    _forget_ended()
    del _marked.calls[-1:]


def watch_forward(model: nn.Module) -> Callable[[], None]:
    """Compress the activations of the model's forward, until the returned function is called."""
    # If they were traced, they would count once, not whenever the model is called.
    before = model.register_forward_pre_hook(untraced(_enter), prepend=True)
    after = model.register_forward_hook(untraced(_leave))

    def end() -> None:
        before.remove()
        after.remove()

    return end


def compress_activations(model: Model) -> Model:
    """Let groups of backend ``tagc`` compress in this model's forward, and return it.

    :func:`tagc.wrap` does it for the model that it wraps. Call it for a model that is not sharded
    by FSDP and not wrapped by DDP: with tensor or expert parallelism alone. (Backwards, and the
    sends between pipeline stages, are always compressed.)
    """
    watch_forward(model)
    return model
