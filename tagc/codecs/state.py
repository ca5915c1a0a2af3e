"""Names in a codec's state, and the bound of its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

MAX_COUNT = 2**59
"""No counter of any run gets this large."""


def nested(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's state, with its name before each key."""
    return {f"{name}.{key}": tensor for key, tensor in state.items()}


def part_of(name: str, state: Mapping[str, T]) -> dict[str, T]:
    """The inverse of :func:`nested`."""
    start = f"{name}."
    return {k.removeprefix(start): t for k, t in state.items() if k.startswith(start)}


def check_counter(name: str, value: Tensor) -> None:
    """Raise ValueError if a counter ``[]`` is negative, or at least ``MAX_COUNT``."""
    if not 0 <= int(value) < MAX_COUNT:
        raise ValueError(f"{name} is {int(value)}")
