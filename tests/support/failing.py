"""The error of a call, as text that ranks can compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def fails(call: Callable[[], Any]) -> tuple[str, str]:
    """The type and message of what `call` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"
