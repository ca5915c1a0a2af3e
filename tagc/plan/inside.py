"""What the ranks of a host send each other about gradients that they add up: the gradients as they
are, or in fewer bits.

What a policy compresses between hosts may travel inside of them as bfloat16, or in 8 bits, rounded
by chance: nothing is owed then, so no rank remembers anything of what its neighbours rounded away.
What a policy leaves dense is added up as it is.
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
    """The codec that stands behind the word."""
    return _CONFIGS[inside]


def without_effect(units: Sequence[UnitPlan], inside: Inside) -> Iterator[str]:
    """Why nothing is sent in fewer bits inside hosts, although the policy asks for it."""
    if inside == "native" or any(unit.inside is not None for unit in units):
        return
    if not any(unit.info.ranks_per_host > 1 for unit in units):
        why = "every rank sends for itself"
    elif any(unit.compressed for unit in units):
        why = "the gradients that it compresses have two bytes already"
    else:
        why = "no gradient is compressed between hosts"
    yield f"the policy's key 'inside: {inside}' changes nothing here: {why}"


def plan_inside(unit: UnitPlan, inside: Inside) -> UnitPlan:
    """The unit, its ranks adding up inside a host as a policy says, where they do."""
    adds_up = unit.direction == "gradients" and unit.info.ranks_per_host > 1
    # Two bytes are no fewer than two.
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

    W = unit.info.world_size
    segments = tuple(map(of_host, unit.segments))
    message = MessagePlan(segments=segments, made=W, read=W, rows=unit.peers)
    return replace(unit, inside=message)
