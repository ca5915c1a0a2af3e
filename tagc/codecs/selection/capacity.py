"""How many groups a rank may keep."""

from __future__ import annotations

# Capacity relative to the target density: groups that a step selects beyond it wait.
SLACK = 1.0625
# The smallest capacity of a shared support: its window of exploration takes 32 groups.
MIN_SHARED = 64


def capacity_for(density: float, groups: int) -> int:
    """The most of ``groups`` that a rank keeps per destination: the density plus slack."""
    return min(groups, int(SLACK * density * groups) + 1)
