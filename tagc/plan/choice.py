"""``codec: auto``: the codecs that it may become, the protocol of the choice, and the policy that
repeats a choice."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tagc.codecs import CodecConfig
from tagc.codecs.delta import DeltaConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig
from tagc.plan.unit_plan import UnitPlan
from tagc.policy import Policy, show
from tagc.policy.rules import AutoConfig, AutoParametersConfig

AUTO_BITS = (32, 16, 8, 4)
"""The options in bits per element; parameters stop at 8 if no copy may be stored."""
ABOUT_FREEZING = (
    "codec auto measures at every start and may choose differently, which changes losses: "
    'plan().freeze("chosen.yaml") writes this choice, for policy="chosen.yaml"'
)
# 8 bits per element, and a scale of 16 bits for every 256 elements.
_KEPT_BYTES = 1 + 2 / 256


@dataclass(frozen=True, kw_only=True)
class Choice:
    index: int
    why: str


class Choose(Protocol):
    """Resolves ``codec: auto`` for a whole unit: if one segment is compressed, the unit uses
    messages instead of the backend's own collective. ``notes`` are the facts behind the choices."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def __call__(self, position: int, options: Sequence[UnitPlan]) -> Choice:
        """Choose among plans of the unit at ``position``, the least compressed first. All ranks
        must make the same choice."""
        ...


def resolve_auto(config: AutoConfig, bits: int, *, copy_bytes: float, owes: bool) -> CodecConfig:
    """The codec with ``bits`` bits, but at least the rule's ``min_bits``. A copy takes
    ``copy_bytes`` per parameter of the model. Without a residual (``owes``), gradients are rounded
    stochastically."""
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


Settled = Mapping[tuple[str, int], Mapping[CodecConfig, Sequence[str]]]
"""The parameters of each codec that ``auto`` became, by direction and index of the rule."""


def frozen(policy: Policy, settled: Settled) -> str:
    """The text of a policy's file that repeats the choices of ``codec: auto``."""
    data: dict[str, Any] = policy.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for direction in ("gradients", "parameters", "replicas"):
        rules = [
            rule
            for i, given in enumerate(data.get(direction) or ())
            for rule in _settled_rules(given, settled.get((direction, i), {}))
        ]
        if rules:
            data[direction] = rules
    return "\n".join(t for t in show(data).splitlines() if not t.lstrip().startswith("#")) + "\n"


def _settled_rules(rule: dict[str, Any], codecs: Mapping[CodecConfig, Sequence[str]]) -> Any:
    """The rule, or one for the parameters of each codec that ``auto`` became."""
    if rule["codec"]["kind"] != "auto":
        yield rule
        return
    # A rule that selects no parameter is dense: nothing was measured for it.
    for config, names in codecs.items() or [(DenseConfig(), ())]:
        kind = type(config).model_fields["kind"].default
        codec = {"kind": kind} | config.model_dump(mode="json", exclude_unset=True)
        one = rule | {"codec": codec}
        if len(codecs) > 1:
            one["when"] = {"name": [glob.escape(name) for name in names]}
        if codec["kind"] == "dense":
            one.pop("feedback", None)
        yield one
