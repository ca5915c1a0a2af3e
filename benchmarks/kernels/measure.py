"""One case: every contender checked, then all of them timed in turns beside a plain copy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..timing import Clock, Timed, interleaved
from .case import Case
from .registry import OURS, Contender, load

_COPY = "copy of the floor's bytes"


def measure(case: Case, device: torch.device, clock: Clock, *, budget: float) -> dict[str, Any]:
    """The record of a case.

    ``fraction`` is that of the copy bandwidth which the device reaches in the same turns: the
    time of a plain copy that reads and writes ``floor_bytes`` in all, over the contender's. A
    speedup is only given where both results are right, and ``refused`` says why where not.
    """
    problem = load(case.op).problem(case, device)
    contenders, results = _checked(problem.contenders)
    source = torch.zeros(max(1, problem.floor_bytes // 8), device=device)
    target = torch.empty_like(source)
    timed = {_COPY: Timed(lambda: target.copy_(source))}
    timed |= {name: Timed(c.run, c.before) for name, c in contenders.items()}
    timings = interleaved(timed, clock, budget=budget)
    copy = timings.pop(_COPY)
    for name, timing in timings.items():
        results[name] |= {
            "ms": _round(1e3 * timing.seconds),
            "host_ms": _round(1e3 * timing.host_seconds),
            "repeats": timing.repeats,
            "fraction": _round(copy.seconds / timing.seconds),
        }
    speedup, refused = _speedups(results)
    return (
        {"case": case.name}
        | asdict(case)
        | problem.facts
        | {
            "floor_bytes": problem.floor_bytes,
            "copy_ms": _round(1e3 * copy.seconds),
            "copy_gb_per_s": _round(problem.floor_bytes / copy.seconds / 1e9),
            "contenders": results,
            "speedup": speedup,
            "refused": refused,
        }
    )


def _checked(makers: dict[str, Any]) -> tuple[dict[str, Contender], dict[str, dict[str, Any]]]:
    """Run everything once, then check everything: a check may look at other results."""
    contenders: dict[str, Contender] = {}
    results: dict[str, dict[str, Any]] = {name: {} for name in makers}
    for name, make in makers.items():
        try:
            contender = make()
            contender.before()
            contender.run()
        except Exception as error:  # reported; the others go on
            results[name]["wrong"] = said(error)
        else:
            contenders[name] = contender
    for name, contender in contenders.items():
        try:
            wrong = contender.check()
        except Exception as error:
            wrong = f"the check failed: {said(error)}"
        results[name] |= {"note": contender.note, "wrong": wrong} | contender.details
    return contenders, results


def _speedups(results: dict[str, dict[str, Any]]) -> tuple[dict[str, float], dict[str, str]]:
    """Of ours over each other contender, or the reason why not."""
    speedup: dict[str, float] = {}
    refused: dict[str, str] = {}
    mine = results[OURS]
    for name, other in results.items():
        if name == OURS:
            continue
        if mine["wrong"]:
            refused[name] = f"{OURS}: {mine['wrong']}"
        elif other["wrong"]:
            refused[name] = f"{name}: {other['wrong']}"
        else:
            speedup[name] = _round(other["ms"] / mine["ms"])
    return speedup, refused


def said(error: Exception) -> str:
    """Kind and first line of an error."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"


def _round(x: float) -> float:
    return float(f"{x:.4g}")
