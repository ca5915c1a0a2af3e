"""Tells a process group whether it carries activations.

The group of a mesh's dimension also carries what must stay exact: a sharded parameter that
``full_tensor()`` gathers for a checkpoint, or what an optimizer gathers in its step. A group cannot
tell these from activations. So collectives are coded only while a backward runs, and in the forward
of a model given to :func:`compress_activations`, as :func:`tagc.wrap` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


class _Depth(threading.local):
    """How many such forwards this thread is in; several if models call each other."""

    value = 0


_depth = _Depth()


def carries_activations() -> bool:
    """Whether this thread is in a forward or a backward, so that groups compress."""
    return _depth.value > 0 or torch._C._current_graph_task_id() != -1


@contextmanager
def activations() -> Iterator[None]:
    """Collectives in this context carry activations: for forwards that are no module's call."""
    _depth.value += 1
    try:
        yield
    finally:
        _depth.value -= 1


def _enter(*args: Any) -> None:
    _depth.value += 1


def _leave(*args: Any) -> None:
    _depth.value -= 1


def watch_forward(model: nn.Module) -> Callable[[], None]:
    """Compress the activations of the model's forward.

    Returns:
        A function that ends it.
    """
    # A compiler that traces the model must not trace these: they count when the model is called.
    enter: Any = torch.compiler.disable(_enter)
    leave: Any = torch.compiler.disable(_leave)
    before = model.register_forward_pre_hook(enter, prepend=True)
    after = model.register_forward_hook(leave, always_call=True)

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
