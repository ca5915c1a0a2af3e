"""Plans and advice as data for JSON: ``tagc explain --json`` and ``tagc advise --json``.

Sizes are in bytes, times in seconds, bandwidths in bytes/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tagc.costs.advise import verdict
from tagc.costs.candidates import PAYS, Advisor, Candidate
from tagc.costs.quality import loss_of
from tagc.costs.shapes import ModelShapes
from tagc.plan import Plan
from tagc.plan.alike import merged
from tagc.plan.row import Row

_SIZES = ("dense_bytes", "wire_bytes", "stored_bytes")


def model_data(shapes: ModelShapes) -> dict[str, Any]:
    """The size and source of the model."""
    return {
        "parameters": shapes.numel,
        "blocks": len(shapes.blocks),
        "source": shapes.source or None,
    }


def plan_data(shapes: ModelShapes, plan: Plan, *, full: bool) -> dict[str, Any]:
    """A plan: what a rank sends and stores, by direction and by parameter.

    Args:
        full: whether each parameter has a row, even if blocks are equal.
    """
    rows = plan.rows if full else merged(plan.rows)
    directions = dict.fromkeys(row.direction for row in rows)
    return {
        "model": model_data(shapes),
        "policy": plan.policy.name,
        "warmup_steps": plan.warmup_steps,
        "micro_batches": plan.micro_batches,
        "sent": {
            direction: {"wire_bytes": wire, "dense_bytes": dense}
            for direction, (wire, dense) in plan.sent.items()
        },
        "directions": {
            direction: _sums([row for row in rows if row.direction == direction])
            for direction in directions
        },
        "memory": {**asdict(plan.memory), "peak": plan.memory.peak},
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
        "rows": [asdict(row) for row in rows],
    }


def advice_data(advisor: Advisor) -> dict[str, Any]:
    """The predicted step of every candidate, and the verdict."""
    q = advisor.question
    dense, other = advisor.best(dense=True, fitting=False), advisor.best(dense=False)
    last = advisor.last_to_pay()
    return {
        "model": model_data(q.shapes),
        "ranks": q.world_size,
        "ranks_per_host": q.link.ranks_per_host,
        "replicas": q.replicas,
        "ddp": q.ddp,
        "bandwidth": q.link.bandwidth,
        "latency": q.link.latency,
        "compute": q.compute,
        "overlap": q.overlap,
        "codec_time": advisor.about_codecs,
        "candidates": [_candidate(advisor, candidate) for candidate in advisor.candidates],
        "refused": advisor.refused,
        "best_dense": None if dense is None else dense.name,
        "best_policy": None if other is None else other.name,
        "pays": other is not None and advisor.saving(other) >= PAYS,
        "pays_up_to": None
        if last is None
        else {"policy": last[0], "bandwidth": None if math.isinf(last[1]) else last[1]},
        "verdict": verdict(advisor),
    }


def _candidate(advisor: Advisor, candidate: Candidate) -> dict[str, Any]:
    cost = advisor.cost(candidate)
    return {
        "name": candidate.name,
        "dense": candidate.dense,
        "host_sends": cost.wire_bytes,
        "link": cost.link,
        "codec": cost.codec,
        "step": cost.seconds,
        "saving": advisor.saving(candidate),
        "memory": candidate.memory,
        "fits": advisor.fits(candidate),
        "loss": loss_of(candidate.name, ddp=advisor.question.ddp),
        "rate_factor": candidate.rate,
    }


def _sums(rows: Sequence[Row]) -> dict[str, float]:
    return {name: sum(getattr(row, name) for row in rows) for name in _SIZES}
