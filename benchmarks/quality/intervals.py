"""Means of paired differences, with the interval in which they lie with 95% confidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

# Student's t, two-sided 95%, by degrees of freedom; 1.96 at last.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval (infinite for one pair), of ``pairs``."""

    mean: float
    half: float
    pairs: int

    @property
    def is_zero(self) -> bool:
        """Whether zero lies in it."""
        return math.isfinite(self.mean) and abs(self.mean) <= self.half

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{self.mean:+.2%} (1)"
        return f"{self.mean:+.2%} ± {self.half * 100:.2f} ({self.pairs})"


def difference(losses: Mapping[int, float], dense: Mapping[int, float]) -> Interval | None:
    """Of losses by seed, relative to dense's of the same seed; None without a pair. A run that
    diverged, whose loss is infinite, makes the mean infinite."""
    found = [losses[seed] / dense[seed] - 1 for seed in sorted(losses.keys() & dense.keys())]
    if not found:
        return None
    mean = statistics.fmean(found)
    if len(found) == 1 or not math.isfinite(mean):
        return Interval(mean, math.inf, len(found))
    t = _T[min(len(found) - 2, len(_T) - 1)]
    return Interval(mean, t * statistics.stdev(found) / math.sqrt(len(found)), len(found))
