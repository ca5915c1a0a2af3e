"""Room for what a step selects."""

from __future__ import annotations

# Room above the target density, per destination: what a step selects beyond it waits a step.
SLACK = 1.0625
# Groups that a shared support must have room for: exploring takes 32 of them.
MIN_SHARED = 64


def capacity_for(density: float, groups: int) -> int:
    """Groups that a rank keeps at most of so many: the density's share, and the slack."""
    return min(groups, int(SLACK * density * groups) + 1)
