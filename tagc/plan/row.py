"""A row of the table that a plan prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of the plan, or several equal ones. Bytes are what a rank sends in a step, or
    stores.

    Attributes:
        why_dense: why it is not compressed; empty if it is.
        alike: how many parameters the row stands for.
    """

    direction: str
    unit: str
    param: str
    shape: tuple[int, ...]
    role: str
    codec: str
    density: float
    dense_bytes: float
    wire_bytes: float
    stored_bytes: float
    why_dense: str = ""
    alike: int = 1
