"""Modules of the kernels' package, which not every machine can import."""

from __future__ import annotations

import importlib
from typing import Any


def kernels(name: str) -> Any:
    """A module of the kernels' package."""
    return importlib.import_module(f"tagc.triton_kernels.{name}")
