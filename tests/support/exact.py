"""Comparing to the last bit."""

from __future__ import annotations

from typing import Any

import torch

EXACT: Any = {"rtol": 0, "atol": 0}


def equal(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Both to the last bit; NaN equals NaN."""
    torch.testing.assert_close(mine, other, **EXACT, equal_nan=True)
