"""torch's profiler beside gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch._C._autograd import _enable_profiler
from torch._C._profiler import RecordScope
from torch.profiler import ProfilerActivity, profile


@contextmanager
def profiled_functions(**options: Any) -> Iterator[Any]:
    """A profiler of the CPU that sees functions, and neither collectives nor ``record_function``.

    gloo's thread notes the end of a collective after its waiter went on, in memory that a profiler
    may have freed by then (torch 2.13).
    """
    scopes = {RecordScope.FUNCTION}
    enabled = partial(_enable_profiler, scopes=scopes)  # pyright: ignore[reportCallIssue]
    profiler = profile(activities=[ProfilerActivity.CPU], **options)
    with patch("torch.autograd.profiler._enable_profiler", enabled), profiler:
        yield profiler
