"""The device of an operator. Triton launches on CUDA's current device, wherever the tensors are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_device_of(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that makes the device of the tensor argument ``name`` current during a call.

    The operator keeps its signature, for type checkers and for :func:`inspect.signature`.
    """

    def guard(operator: Callable[P, R]) -> Callable[P, R]:
        place = list(inspect.signature(operator).parameters).index(name)

        @functools.wraps(operator)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            tensor: Any = args[place] if place < len(args) else kwargs[name]
            with torch.cuda.device_of(tensor):
                return operator(*args, **kwargs)

        return guarded

    return guard
