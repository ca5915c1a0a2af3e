"""One case: every contender checked, then all of them timed in turns beside a plain copy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from .cases import Case
from .clocks import Clock, Timed, interleaved
from .operators import Contender, problem

OURS = "tagc"
_COPY = "copy of the floor's bytes"


def measure(case: Case, device: torch.device, clock: Clock, *, budget: float) -> dict[str, Any]:
    """The record of a case.

    ``fraction`` is that of the copy bandwidth which the device reaches in the same turns: the
    time of a plain copy that reads and writes ``floor_bytes`` in all, over the contender's. A
    speedup is only given where both results are right, and ``refused`` says why where not.
    """
    made = problem(case, device)
    contenders, results = _checked(made.contenders)
    source = torch.zeros(max(1, made.floor_bytes // 8), device=device)
    target = torch.empty_like(source)
    copying = {_COPY: Timed(lambda: target.copy_(source))}
    timings = interleaved(copying | contenders, clock, budget=budget)
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
        | made.facts
        | {
            "floor_bytes": made.floor_bytes,
            "copy_ms": _round(1e3 * copy.seconds),
            "copy_gb_per_s": _round(made.floor_bytes / copy.seconds / 1e9),
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
    mine, others = results[OURS], {k: v for k, v in results.items() if k != OURS}
    refused = {
        name: f"{OURS}: {mine['wrong']}" if mine["wrong"] else f"{name}: {other['wrong']}"
        for name, other in others.items()
        if mine["wrong"] or other["wrong"]
    }
    return {
        name: _round(other["ms"] / mine["ms"])
        for name, other in others.items()
        if name not in refused
    }, refused


def said(error: Exception) -> str:
    """Kind and first line of an error."""
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}"


def _round(x: float) -> float:
    return float(f"{x:.4g}")
