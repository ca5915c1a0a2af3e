"""Marks of tests."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter, or a world size, that moves its test to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def named(value: Any) -> str:
    """A parameter's text in its test's name: modules of operators and dtypes have no dots."""
    return getattr(value, "__name__", str(value)).rpartition(".")[2]


def varied(cases: Sequence[pytest.Function], count: int) -> list[pytest.Function]:
    """``count`` of a test's cases that cover as many of its parameters' values as possible. Each
    word of a value counts (``quantized int8``). On a tie, cases far apart win."""
    left = {
        i: {
            (name, word)
            for name, value in case.callspec.params.items()
            for word in (str(value), *str(value).split()[:3])
        }
        for i, case in enumerate(cases)
    }
    seen: set[tuple[str, str]] = set()
    chosen: list[int] = []

    def worth(i: int) -> tuple[int, int]:
        return len(left[i] - seen), min((abs(i - other) for other in chosen), default=0)

    while left and len(chosen) < count:
        best = max(left, key=worth)
        seen |= left.pop(best)
        chosen.append(best)
    return [cases[i] for i in chosen]
