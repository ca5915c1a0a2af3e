"""``codec: auto``: the codecs that it may become, and the protocol of the choice."""

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
"""The options in bits per element; parameters stop at 8 if no copy may be stored."""
# 8 bits per element, and a scale of 16 bits for every 256 elements.
_KEPT_BYTES = 1 + 2 / 256


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The index of the chosen plan among a unit's options, and the reason."""

    index: int
    why: str


class Choose(Protocol):
    """Resolves ``codec: auto`` for a whole unit: if one segment is compressed, the unit uses
    messages instead of the backend's own collective.

    Attributes:
        notes: the facts behind the choices.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        """Choose among plans of the unit at ``position``, the least compressed first. All ranks
        must make the same choice."""
        ...


def resolve_auto(config: AutoConfig, bits: int, *, copy_bytes: float, owes: bool) -> CodecConfig:
    """The codec with ``bits`` bits, but at least the rule's ``min_bits``.

    Args:
        copy_bytes: bytes per parameter of the model that a rank would store for a copy.
        owes: whether gradients have a residual; without one they are rounded stochastically.
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
