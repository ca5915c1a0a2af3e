"""Check that nothing waits for a GPU: torch's own check, if there is a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def synchronizing_raises() -> Iterator[None]:
    """Inside, torch raises if the host would wait for the device (except for some operations)."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # It warns once that it is a prototype; warnings are errors here.
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
