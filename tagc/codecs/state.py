"""Names and counts in a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")

_MOST = 2**59


def nested(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A part's state, with its name before each key."""
    return {f"{name}.{key}": tensor for key, tensor in state.items()}


def part_of(name: str, state: Mapping[str, T]) -> dict[str, T]:
    """The inverse of :func:`nested`."""
    start = f"{name}."
    return {k.removeprefix(start): t for k, t in state.items() if k.startswith(start)}


def check_counts(name: str, counts: Tensor) -> None:
    """Raise ValueError if any of ``counts`` is negative, or larger than in any run."""
    counts = counts.long()  # int32 does not hold the bound
    wrong = counts[(counts < 0) | (counts > _MOST)].tolist()
    if wrong:
        raise ValueError(f"{name}: a count is {wrong[0]}: negative, or larger than in any run")
