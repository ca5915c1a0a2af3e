"""Reads regular files that users name, up to a limit; locks for the processes of a host."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # on Windows there is no lock
    fcntl = None

_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: if it cannot be opened, or is a folder, a device, a pipe or a socket, which may
            have no end; ``strerror`` says which.
    """
    try:
        # O_NONBLOCK, because a pipe without a writer would block here.
        descriptor = os.open(path, _FLAGS)
    except ValueError:  # a null character, or half a surrogate pair
        raise OSError(errno.EINVAL, "no file can have that name") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, "not a regular file but a device, a pipe or a socket")
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes.

    Raises:
        OSError: as `open_regular` does, or if the file is larger.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes")
    return content


@contextmanager
def locked(folder: Path, key: str) -> Iterator[None]:
    """Hold the lock ``key`` in ``folder``, one process of a host at a time. If files cannot be
    written there, there is no lock."""
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
