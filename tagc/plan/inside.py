"""How the ranks of a host send each other the gradients that they add up: uncompressed or not.

Segments that a policy compresses between hosts may be sent inside them as bfloat16, or in 8 bits
with stochastic rounding. Neither has feedback, so no rank keeps a residual for its neighbours.
Dense segments are summed uncompressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from tagc.codecs import CodecConfig, PlanRequest, plan_codec
from tagc.codecs.dense import DenseConfig
from tagc.codecs.quantized import QuantizedConfig
from tagc.plan.messages import MessagePlan, Segment
from tagc.plan.unit_plan import UnitPlan
from tagc.policy import Inside

_CONFIGS: dict[Inside, CodecConfig] = {
    "native": DenseConfig(),
    "bfloat16": DenseConfig(wire="bfloat16"),
    "int8": QuantizedConfig(bits=8, rounding="stochastic"),
}
assert set(_CONFIGS) == set(get_args(Inside))


def config_inside(inside: Inside) -> CodecConfig:
    """The codec for a value of the policy's key ``inside``."""
    return _CONFIGS[inside]


def without_effect(units: Sequence[UnitPlan], inside: Inside) -> Iterator[str]:
    """A note if the policy asks for fewer bits inside hosts, but no unit sends fewer."""
    if inside == "native" or any(unit.inside is not None for unit in units):
        return
    if not any(unit.compressed for unit in units):
        why = "no gradient is compressed between hosts"
    elif any(unit.info.ranks_per_host > 1 for unit in units):
        why = "the gradients that it compresses have two bytes already"
    else:
        why = "every rank sends for itself"
    yield f"the policy's key 'inside: {inside}' changes nothing here: {why}"


def plan_inside(unit: UnitPlan, inside: Inside) -> UnitPlan:
    """The unit with messages inside hosts, if its ranks add up there and messages send less."""
    adds_up = unit.direction == "gradients" and unit.info.ranks_per_host > 1
    # bfloat16 saves nothing if gradients have two bytes already.
    fewer = inside == "int8" or (inside == "bfloat16" and unit.info.dtype.itemsize > 2)
    if not (adds_up and fewer and unit.compressed):
        return unit

    def of_host(segment: Segment) -> Segment:
        request = PlanRequest(
            columns=segment.columns,
            world_size=unit.info.ranks_per_host,
            dtype=unit.info.dtype,
            feedback=None,
        )
        config = config_inside(inside if segment.compressed else "native")
        return replace(segment, codec=plan_codec(config, request))

    rows, each = unit.rows, unit.rows // unit.info.ranks_per_host
    segments = tuple(map(of_host, unit.segments))
    message = MessagePlan(segments=segments, made=rows, read=rows, rows=each)
    return replace(unit, inside=message)
