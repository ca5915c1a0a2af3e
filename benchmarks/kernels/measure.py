"""One case: the results compared, then all contenders timed in turns beside a plain copy, so that a
slow moment hits all of them. Results are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..records import Record
from .operators import Case, Contender, contenders, problem

OURS = "tagc"
# Turns: uncounted ones, the most, and those of a contender that has used up its time.
_WARM_UP, _REPEATS, _LEAST = 2, 30, 3

Clock = Callable[[Contender], tuple[float, float]]
"""Times one run: seconds on the device, and until the call returned, which is less if nothing waits
for a GPU."""


class HostClock:
    """Wall-clock time, with cold caches.

    In training, a forward and a backward pass run between two calls of an operator. With warm
    caches, times would depend on the contender that ran before.
    """

    about = "median wall-clock time; caches flushed before every run"

    def __init__(self) -> None:
        # More than the caches that a core of the usual servers has to itself or shares with few.
        self._flush = torch.zeros((128 << 20) // 4)

    def __call__(self, timed: Contender) -> tuple[float, float]:
        timed.before()
        self._flush.add_(1.0)
        start = time.perf_counter()
        timed.run()
        elapsed = time.perf_counter() - start
        return elapsed, elapsed


class CudaClock:
    """CUDA events around the run, with a cold L2 cache and launches queued ahead.

    In training, backward keeps the device busy while the host runs ahead. So the device sleeps
    before the first event for as long as the host needs for its launches. The time is then the
    device's, unless the run itself waits for it.
    """

    about = "median of CUDA events; L2 flushed before every run, launches queued ahead"
    _LONGEST_SLEEP = 0.03

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        l2 = getattr(properties, "L2_cache_size", 64 << 20)
        self._flush = torch.empty(max(4 * l2, 256 << 20), dtype=torch.uint8, device=device)
        self._host: dict[int, float] = {}

    def __call__(self, timed: Contender) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timed.before()
        self._flush.zero_()
        sleep = min(2 * self._host.get(id(timed), 0.0), self._LONGEST_SLEEP)
        if sleep:
            torch.cuda._sleep(int(sleep * 2e9))  # cycles of a clock of about 2 GHz
        start.record()
        began = time.perf_counter()
        timed.run()
        host = time.perf_counter() - began
        end.record()
        end.synchronize()
        self._host[id(timed)] = host
        return start.elapsed_time(end) / 1e3, host


def interleaved(
    contenders: Mapping[str, Contender], clock: Clock, *, budget: float
) -> dict[str, list[tuple[float, float]]]:
    """The clock's times of all contenders, in turns. Each may take ``budget`` seconds in all: a
    slow one skips later turns, but takes ``_LEAST``, or a single one if that exceeds the budget."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for turn in range(_WARM_UP + _REPEATS):
        for name, timed in contenders.items():
            enough = 1 if spent[name] > 2 * budget else _LEAST
            if spent[name] >= budget and (turn < _WARM_UP or len(taken[name]) >= enough):
                continue
            began = time.perf_counter()
            measured = clock(timed)
            spent[name] += time.perf_counter() - began
            if turn >= _WARM_UP:
                taken[name].append(measured)
    return taken


def measure(case: Case, device: torch.device, clock: Clock, *, budget: float) -> Record:
    """The record of a case.

    ``fraction`` is that of the copy bandwidth which the device reaches in the same turns: the
    time of a plain copy that reads and writes ``floor_bytes`` in all, over the contender's.

    Raises:
        RuntimeError: if ours differs from the reference.
    """
    work = problem(case, device)
    timed = contenders(work, device)
    for contender in timed.values():
        contender.before()
        contender.run()
    if not all(map(torch.equal, timed[OURS].results, timed["reference"].results)):
        raise RuntimeError("wrong: its bits differ from the reference's")
    source = torch.zeros(max(1, work.floor // 8), device=device)
    target = torch.empty_like(source)
    copying = {"copy": Contender(run=lambda: target.copy_(source))}
    taken = interleaved(copying | timed, clock, budget=budget)
    copy = statistics.median(seconds for seconds, _ in taken.pop("copy"))
    results: dict[str, Record] = {}
    for name, times in taken.items():
        seconds, host = (statistics.median(part) for part in zip(*times, strict=True))
        results[name] = {
            "ms": _round(1e3 * seconds),
            "host_ms": _round(1e3 * host),
            "fraction": _round(copy / seconds),
        }
    mine = results[OURS]["ms"]
    return {
        **asdict(case),
        "floor_bytes": work.floor,
        "copy_gb_per_s": _round(work.floor / copy / 1e9),
        "contenders": results,
        "speedup": {name: _round(r["ms"] / mine) for name, r in results.items() if name != OURS},
    }


def _round(x: float) -> float:
    return float(f"{x:.4g}")
