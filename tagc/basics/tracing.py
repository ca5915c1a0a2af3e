"""Ranges in the profiler, and functions that ``torch.compile`` leaves out of what it traces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

Function = TypeVar("Function", bound=Callable[..., Any])
_NOTHING = nullcontext()


def profiled(what: str, name: str) -> AbstractContextManager[object]:
    """The range ``TAGC::what (name)`` of a profiler. Without one it is nothing, because even then
    torch's own range takes as long as starting a kernel, and a step has hundreds. (An
    ``ExecutionTraceObserver`` alone is no profiler.)"""
    if not profiling():
        return _NOTHING
    return record_function(f"TAGC::{what} ({name})")


def profiling() -> bool:
    """Whether a profiler runs."""
    # The second knows this thread only, and the first not every profiler.
    return torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled()


def untraced(function: Function) -> Function:
    """``function``, which runs as it is where a compiler traces its caller. This loads the
    compiler, so don't decorate what an import defines."""
    left_out: Any = torch.compiler.disable(function)
    return left_out
