"""Marks of tests."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter, or a world size, that moves its test to `make test-slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def named(value: Any) -> str:
    """A parameter's text in its test's name: modules of operators and dtypes have no dots."""
    return getattr(value, "__name__", str(value)).rpartition(".")[2]
