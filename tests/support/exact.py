"""Bitwise comparison."""

from __future__ import annotations

from typing import Any

import torch

EXACT: Any = {"rtol": 0, "atol": 0}


def equal(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Whether both have the same bits; NaN equals NaN."""
    torch.testing.assert_close(mine, other, **EXACT, equal_nan=True)
