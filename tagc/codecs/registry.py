"""The list of all codecs. To add one, write its module and add a line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tagc.codecs.config import CodecConfig
from tagc.codecs.delta import DELTA
from tagc.codecs.dense import DENSE, plan_empty
from tagc.codecs.exact import EXACT
from tagc.codecs.matrix import MATRIX
from tagc.codecs.plan import CodecKind, CodecPlan, CodecSegment, PlanRequest
from tagc.codecs.quantized import QUANTIZED
from tagc.codecs.sketch import SKETCH

CODECS: tuple[CodecKind, ...] = (SKETCH, QUANTIZED, MATRIX, DELTA, EXACT, DENSE)
"""All codecs, in the order of their words in a unit's message."""


def kind_of(codec: CodecConfig | CodecPlan) -> CodecKind:
    """The kind of a configuration or of a plan."""
    for kind in CODECS:
        configs = (kind.config, kind.parameter_config)
        if isinstance(codec, (*filter(None, configs), kind.plan)):
            return kind
    raise ValueError(f"{type(codec).__name__} is of no codec in CODECS")


def plan_codec(config: CodecConfig, request: PlanRequest) -> CodecPlan:
    """The plan of a codec for one segment, with all sizes."""
    if request.columns == 0:
        return plan_empty(request)
    return kind_of(config).make_plan(config, request)


def in_message_order(segments: Sequence[CodecSegment[CodecPlan]]) -> list[list[Any]]:
    """The segments grouped by kind, in the order of ``CODECS``; groups may be empty."""
    return [[s for s in segments if isinstance(s.codec, kind.plan)] for kind in CODECS]
