"""Compiles kernels once per host, not once per rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tagc.basics.locked import locked
from tagc.ops.cpu import kernels

# Beside the compiled kernels: if no file can be written here, numba cannot write its cache either.
_FOLDER = Path(kernels.__file__).parent / "__pycache__"


def once_a_host(compile_for: Callable[..., None]) -> Callable[..., None]:
    """Let one process at a time compile for the same arguments. The ranks that wait then find the
    kernels in numba's cache."""

    @cache
    @wraps(compile_for)
    def once(*arguments: Any) -> None:
        with locked(_FOLDER, f"{compile_for.__module__} {arguments}"):
            compile_for(*arguments)

    return once
