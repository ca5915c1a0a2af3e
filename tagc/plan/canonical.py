"""The canonical form of a plan, version 1; :attr:`tagc.plan.Plan.fingerprint` is its SHA-256.

Ranks compare the fingerprint before the first step, and an exact resume needs the same fingerprint
as the checkpoint's. So the form has its own names in its own order, and renaming things in the code
does not change it. It contains what determines arithmetic and the shapes of residuals, but not the
layout of messages. It leaves out attributes added later if they have their default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tagc.codecs import CodecPlan
from tagc.codecs.delta import DeltaPlan
from tagc.codecs.dense import DensePlan
from tagc.codecs.feedback import (
    AverageFeedback,
    ErrorFeedback,
    FeedbackRule,
    LeadFeedback,
)
from tagc.codecs.matrix import MatrixPlan
from tagc.codecs.quantized import QuantizedPlan
from tagc.codecs.sketch.plan import SketchPlan
from tagc.ops.blocks import BlockLayout
from tagc.plan.messages import MessagePlan, Segment
from tagc.plan.unit_plan import TwoShots, UnitPlan
from tagc.plan.units import UnitInfo, UnitParam


def canonical(units: Iterable[UnitPlan]) -> str:
    """The canonical form of units: ranks must agree on it to exchange messages."""
    return json.dumps([_top(unit) for unit in units])


def _top(unit: UnitPlan) -> list[Any]:
    said = [unit.direction, _info(unit.info), _segments(unit.segments)]
    if unit.shots is not None:
        said.append(_shots(unit.info, unit.shots))
    if unit.inside is not None:
        inside = replace(unit.info, world_size=unit.info.ranks_per_host, ranks_per_host=1)
        said.append(_stage(inside, unit.inside, "gradients"))
    return said


def _shots(info: UnitInfo, shots: TwoShots) -> dict[str, Any]:
    info = replace(info, params=())
    return {
        "reduce": _stage(info, shots.reduce, "gradients"),
        "gather": _stage(info, shots.gather, "parameters"),
        "cuts": [
            [{"columns": cut.columns, "length": cut.length} for cut in of_segment]
            for of_segment in shots.cuts
        ],
    }


def _stage(info: UnitInfo, messages: MessagePlan, direction: str) -> dict[str, Any]:
    """A stage's messages, in the form of a unit without stages."""
    return {
        "info": _info(info),
        "segments": _segments(messages.segments),
        "direction": direction,
        "shots": None,
        "inside": None,
    }


def _info(info: UnitInfo) -> dict[str, Any]:
    flat = info.flat
    return {
        "name": info.name,
        "params": [_param(param) for param in info.params],
        "world_size": info.world_size,
        "dtype": str(info.dtype),
        "per_step": info.per_step,
        "ranks_per_host": info.ranks_per_host,
        "flat": None if flat is None else {"columns": flat.columns, "whole": flat.whole},
        **({"replicated": True} if info.replicated else {}),
    }


def _param(param: UnitParam) -> dict[str, Any]:
    return {
        "name": param.name,
        "shape": param.shape,
        "columns": param.columns,
        "dim": param.dim,
        "start": param.start,
    }


def _segments(segments: Iterable[Segment]) -> list[dict[str, Any]]:
    return [_segment(segment) for segment in segments]


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "start": segment.start,
        "stop": segment.stop,
        "params": [_param(param) for param in segment.params],
        "role": segment.role,
        "rule": segment.rule,
        "codec": _codec(segment.codec),
    }


def _codec(plan: CodecPlan) -> dict[str, Any]:
    kind, own = _kind(plan)
    feedback = None if plan.feedback is None else _feedback(plan.feedback)
    return {"kind": kind, "warmup_steps": plan.warmup_steps, "feedback": feedback, **own}


def _kind(plan: CodecPlan) -> tuple[str, dict[str, Any]]:
    match plan:
        case DensePlan():
            return "dense", {"numel": plan.numel, "wire": str(plan.wire), "native": plan.native}
        case SketchPlan():
            layout, symbol = plan.layout, plan.layout.symbol
            table = {
                "numel": layout.numel,
                "symbol": {
                    "name": symbol.name,
                    "lanes": symbol.lanes,
                    "bits": symbol.bits,
                    "headroom": symbol.headroom,
                },
                "keys": layout.keys,
                "hashes": layout.hashes,
                "partition": layout.partition,
            }
            sizes = {"layout": table, "capacity": plan.capacity, "levels": plan.levels}
            return "sketch", {"target": plan.target, "shared": plan.shared} | sizes
        case QuantizedPlan():
            return "quantized", {
                "layout": _blocks(plan.layout),
                "keep_for_backward": plan.keep_for_backward,
                "dithered": plan.dithered,
                "by_content": plan.by_content,
            }
        case MatrixPlan():
            matrices = [
                {
                    "rows": m.rows,
                    "columns": m.columns,
                    "bits": m.bits,
                    "group": m.group,
                    "level": m.level,
                    "count": m.count,
                }
                for m in plan.layouts
            ]
            of_parameters = plan.matrices_of_parameters
            return "matrix", {"layouts": matrices, "matrices_of_parameters": of_parameters}
        case DeltaPlan():
            return "delta", {"code": _codec(plan.code)}
    raise AssertionError(f"{type(plan).__name__} has no canonical form")


def _blocks(layout: BlockLayout) -> dict[str, Any]:
    return {"numel": layout.numel, "bits": layout.bits, "block": layout.block}


def _feedback(rule: FeedbackRule) -> dict[str, Any]:
    stored = {"dtype": str(rule.dtype)}
    match rule:
        case ErrorFeedback():
            return stored
        case AverageFeedback():
            return stored | {"beta": rule.beta, "reset_steps": rule.reset_steps}
        case LeadFeedback():
            return stored | {"lead": rule.lead}
    raise AssertionError(f"{type(rule).__name__} has no canonical form")
