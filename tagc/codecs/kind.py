"""Everything about one kind of codec in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tagc.codecs.config import CodecConfig
from tagc.codecs.plan import CodecPlan, PlanRequest


@dataclass(frozen=True, kw_only=True)
class CodecKind:
    """One kind of codec.

    Attributes:
        name: the name in policies.
        config: the configuration for gradients; None if it cannot send gradients.
        parameter_config: the configuration for parameters; None if it cannot send parameters.
        plan: the class of a segment's plan.
        make_plan: makes a plan from either configuration.
    """

    name: str
    config: type[CodecConfig] | None = None
    parameter_config: type[CodecConfig] | None = None
    plan: type[CodecPlan]
    make_plan: Callable[[Any, PlanRequest], CodecPlan]
