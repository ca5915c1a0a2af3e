"""``codec: auto``: what it may become, and who chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tagc.codecs import CodecConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig
from tagc.plan.unit_plan import UnitPlan
from tagc.policy.configs import AutoConfig

AUTO_BITS = (32, 16, 8, 4)
"""What it chooses from, in bits per element; parameters stop at 8."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One of several plans of a unit, and why."""

    index: int
    why: str


class Choose(Protocol):
    """Resolves ``codec: auto``, for a unit as a whole: what compresses one segment takes all of
    the unit from the backend's own collective to messages.

    Attributes:
        notes: what the choices rest on.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        """Choose among plans of the unit at ``position``, the least compressed first. All ranks
        must choose alike."""
        ...


def resolve_auto(config: AutoConfig, bits: int, *, parameters: bool) -> CodecConfig:
    """The codec of so many bits, or of as few as the rule allows."""
    bits = max(bits, config.min_bits, 8 if parameters else 4)
    if bits == 32:
        return DenseConfig()
    if bits == 16:
        return DenseConfig(wire="bfloat16")
    if parameters:
        return QuantizedParametersConfig(bits=8)
    return QuantizedConfig(bits=8 if bits == 8 else 4)
