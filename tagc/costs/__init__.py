"""Costs of a step with a policy, predicted or measured, and the choices of ``codec: auto``."""

from tagc.costs.auto import is_automatic, measured_choice
from tagc.costs.codec_time import Speed, measured_time, memory_time, no_time, speed_key
from tagc.costs.explain import explain
from tagc.costs.link import Link
from tagc.costs.model import StepCost, Workload, step_cost, unit_seconds, workload
from tagc.costs.shapes import ModelShapes
from tagc.costs.speed import measure_speeds
from tagc.costs.traffic import Traffic, traffic
