"""``codec: auto``: what it may become, and who chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tagc.codecs import CodecConfig
from tagc.codecs.delta import DeltaConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig
from tagc.plan.unit_plan import UnitPlan
from tagc.policy.configs import AutoConfig, AutoParametersConfig

AUTO_BITS = (32, 16, 8, 4)
"""What it chooses from, in bits per element; parameters stop at 8 where no copy may be stored."""
# 8 bits and a scale of 16 for every 256.
_KEPT_BYTES = 1 + 2 / 256


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


def resolve_auto(config: AutoConfig, bits: int, *, copy_bytes: float, owes: bool) -> CodecConfig:
    """The codec of so many bits, or of as few as the rule allows.

    Args:
        copy_bytes: that a rank would store for every parameter of the model, to be sent changes of
            it only.
        owes: whether a gradient's residual is kept; where it is not, gradients are rounded by
            chance.
    """
    parameters = isinstance(config, AutoParametersConfig)
    bits = max(bits, config.min_bits)
    if bits == 32:
        return DenseConfig()
    if bits == 16:
        return DenseConfig(wire="bfloat16")
    if not parameters:
        rounding = "nearest" if owes else "stochastic"
        return QuantizedConfig(bits=8 if bits == 8 else 4, rounding=rounding)
    if bits == 4 and config.memory and config.memory >= copy_bytes:
        return DeltaConfig(bits=4)
    return QuantizedParametersConfig(bits=8, keep_for_backward=config.memory >= _KEPT_BYTES)
