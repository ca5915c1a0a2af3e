"""Ranges in the profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING = nullcontext()


def profiled(what: str, name: str) -> AbstractContextManager[object]:
    """The range ``TAGC::what (name)``. Without a profiler it is nothing: torch's own range then
    takes as long as starting a kernel, and a step has hundreds."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"TAGC::{what} ({name})")
