"""The environment variable that switches compression off."""

from __future__ import annotations

import os

DISABLE = "TAGC_DISABLE"
"""1 on all ranks: tagc checks everything and compresses nothing."""


def is_disabled() -> bool:
    """Whether compression is switched off.

    Raises:
        ValueError: if the variable is neither 0 nor 1.
    """
    text = os.environ.get(DISABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{DISABLE} is {text!r}; it must be 1, 0 or unset")
    return text == "1"
