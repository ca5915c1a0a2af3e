"""One process of a host at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where nobody waits
    fcntl = None


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold a lock of this name in ``folder``, if files can be written there."""
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
