"""Compilation once a host, not once a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tagc.ops.cpu import kernels

try:
    import fcntl
except ImportError:  # not on Windows, where every rank compiles
    fcntl = None


def once_a_host(compile_for: Callable[..., None]) -> Callable[..., None]:
    """Let one process at a time compile for the same arguments: the ranks that wait then find
    the kernels in numba's cache."""

    @cache
    @wraps(compile_for)
    def once(*arguments: Any) -> None:
        with _locked(f"{compile_for.__module__} {arguments}"):
            compile_for(*arguments)

    return once


@contextmanager
def _locked(key: str) -> Iterator[None]:
    """Hold a lock of this name beside the compiled kernels, if files can be written there."""
    folder = Path(kernels.__file__).parent / "__pycache__"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        folder.mkdir(exist_ok=True)
        file = (folder / f"compiling-{name}.lock").open("w")
    except OSError:  # nor could numba write there
        yield
        return
    with file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
