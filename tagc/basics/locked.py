"""A lock that one process of a host holds at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows there is no lock
    fcntl = None


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold the lock ``key`` in ``folder``. If files cannot be written there, there is no lock."""
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"compiling-{name}.lock").open("w")
    except OSError:
        yield
        return
    with file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
