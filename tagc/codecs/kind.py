"""Everything about one kind of codec in one place."""

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
        name: the name in policies.
        config: the configuration for gradients; None if it cannot send gradients.
        parameter_config: the configuration for parameters; None if it cannot send parameters.
        plan: the class of a segment's plan.
        make_plan: makes a plan from either configuration.
        sample: returns the codec's two steps on sample inputs, for timing.
        codec: makes the codec of a unit's segments; None if it cannot send gradients.
    """

    name: str
    config: type[CodecConfig] | None = None
    parameter_config: type[CodecConfig] | None = None
    plan: type[CodecPlan]
    make_plan: Callable[[Any, PlanRequest], CodecPlan]
    sample: Callable[[Any, Sample], TimedSteps]
    codec: Callable[[Sequence[CodecSegment[Any]], CodecSetup], Codec[Any]] | None = None
