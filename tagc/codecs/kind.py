"""What makes a codec known: everything about one kind in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup
from tagc.codecs.config import CodecConfig
from tagc.codecs.plan import CodecPlan, PlanRequest
from tagc.codecs.sample import Sample, TimedSteps


@dataclass(frozen=True, kw_only=True)
class CodecKind:
    """One kind of codec.

    Attributes:
        name: as policies spell it.
        config: what a policy says about gradients with it; None where they cannot have it.
        parameter_config: what it says about parameters; likewise.
        plan: of a segment.
        make_plan: from either configuration.
        codec: state and step of a unit's segments.
        sample: its two steps on inputs of their own, to be timed.
    """

    name: str
    config: type[CodecConfig] | None = None
    parameter_config: type[CodecConfig] | None = None
    plan: type[CodecPlan]
    make_plan: Callable[[Any, PlanRequest], CodecPlan]
    codec: Callable[[Sequence[CodecSegment[Any]], CodecSetup], Codec[Any]]
    sample: Callable[[Any, Sample], TimedSteps]
