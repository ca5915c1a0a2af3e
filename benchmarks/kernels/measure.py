"""One case: every contender checked, then all of them timed in turns beside a plain copy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..records import Record, about_error
from .cases import Case
from .clocks import Clock, Timed, interleaved
from .operators import Contender, problem

OURS = "tagc"
_COPY = "copy of the floor's bytes"


def measure(case: Case, device: torch.device, clock: Clock, *, budget: float) -> Record:
    """The record of a case.

    ``fraction`` is that of the copy bandwidth which the device reaches in the same turns: the
    time of a plain copy that reads and writes ``floor_bytes`` in all, over the contender's. A
    speedup is only given over right results, and ``refused`` says why where not.

    Raises:
        RuntimeError: if ours is wrong.
    """
    floor, makers, facts = problem(case, device)
    contenders, results = _checked(makers)
    if wrong := results[OURS]["wrong"]:
        raise RuntimeError(f"wrong: {wrong}")
    source = torch.zeros(max(1, floor // 8), device=device)
    target = torch.empty_like(source)
    copying = {_COPY: Timed(lambda: target.copy_(source))}
    timings = interleaved(copying | contenders, clock, budget=budget)
    copy = timings.pop(_COPY).seconds
    for name, timing in timings.items():
        results[name] |= {
            "ms": _round(1e3 * timing.seconds),
            "host_ms": _round(1e3 * timing.host_seconds),
            "repeats": timing.repeats,
            "fraction": _round(copy / timing.seconds),
        }
    others = {name: result for name, result in results.items() if name != OURS}
    mine = results[OURS]["ms"]
    return {
        **asdict(case),
        **facts,
        "floor_bytes": floor,
        "copy_ms": _round(1e3 * copy),
        "copy_gb_per_s": _round(floor / copy / 1e9),
        "contenders": results,
        "speedup": {n: _round(r["ms"] / mine) for n, r in others.items() if not r["wrong"]},
        "refused": {n: f"{n}: {r['wrong']}" for n, r in others.items() if r["wrong"]},
    }


def _checked(makers: dict[str, Any]) -> tuple[dict[str, Contender], dict[str, Record]]:
    """Run and check all; the reference is first, and others are compared with it."""
    contenders: dict[str, Contender] = {}
    results: dict[str, Record] = {}
    for name, make in makers.items():
        try:
            contender = make()
            contender.before()
            contender.run()
            wrong = contender.check()
            contenders[name] = contender
        except Exception as error:  # reported; the others go on
            results[name] = {"wrong": about_error(error)}
        else:
            results[name] = {"note": contender.note, "wrong": wrong, **contender.details}
    return contenders, results


def _round(x: float) -> float:
    return float(f"{x:.4g}")
