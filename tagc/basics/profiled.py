"""Ranges in the profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

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
