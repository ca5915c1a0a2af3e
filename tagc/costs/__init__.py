"""Costs of a step with a policy, predicted or measured, and the choices of ``codec: auto``."""

from tagc.costs.auto import is_automatic, measured_choice
from tagc.costs.explain import explain
from tagc.costs.link import Link, StepCost, Traffic, traffic, unit_seconds
from tagc.costs.speed import (
    Speed,
    codec_seconds,
    measure_speed,
    measured_time,
    memory_time,
    no_time,
    speed_key,
    timed_when_asked,
)
