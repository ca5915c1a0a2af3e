"""Marks of tests."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter of a test that is for `make test-slow` with it; a world size, too."""
    return pytest.param(*values, marks=pytest.mark.slow)
