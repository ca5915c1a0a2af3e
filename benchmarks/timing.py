"""Timing and machine facts, the same for every benchmark."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tagc


def interleaved(
    runs: dict[str, Callable[[], object]],
    *,
    before: Callable[[], object] | None = None,
    repeats: int = 30,
    warm_up: int = 3,
) -> dict[str, float]:
    """Median seconds of each run, taken in turns so that a slow moment hits all of them.

    Args:
        before: called ahead of every run, outside the clock, to restore inputs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(warm_up + repeats):
        for name, run in runs.items():
            if before is not None:
                before()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if i >= warm_up:
                seconds[name].append(elapsed)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def machine() -> dict[str, Any]:
    """What the numbers were measured on, for the head of every result."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tagc": tagc.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
