"""The canonical form of a policy, version 1: the text that :attr:`tagc.Policy.hash` hashes.

Checkpoints store that hash, and an exact resume needs the same one. So the form has its own names,
which do not follow renames in the code. Keys added to policies later are left out while they have
their default, as ``inside`` and ``roles`` are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tagc.codecs.config import Strict
from tagc.codecs.delta import DeltaConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.feedback import FeedbackConfig
from tagc.codecs.matrix import MatrixConfig
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig
from tagc.codecs.sketch import SketchConfig
from tagc.policy.conditions import When
from tagc.policy.configs import AutoConfig, AutoParametersConfig
from tagc.policy.dimensions import DimensionRule, QuantizedActivationsConfig
from tagc.policy.roles import Role
from tagc.policy.rules import ParameterRule, Rule
from tagc.policy.sites import OuterConfig, SitesConfig


def canonical(
    *,
    gradients: Sequence[Rule],
    parameters: Sequence[ParameterRule],
    replicas: Sequence[Rule],
    inside: str,
    roles: Mapping[Role, Sequence[str]],
    dimensions: Mapping[str, DimensionRule],
    sites: SitesConfig | None,
) -> str:
    """Everything in a policy that changes a run. Name, `about` and `tuning` do not."""
    content: dict[str, Any] = {
        "schema": 1,
        "gradients": [_rule(rule) for rule in gradients],
        "parameters": [_rule(rule) for rule in parameters],
        "replicas": [_rule(rule) for rule in replicas],
    }
    if inside != "native":
        content["inside"] = inside
    if roles:
        content["roles"] = [[role, list(globs)] for role, globs in roles.items()]
    if dimensions:
        content["dimensions"] = {name: _part(rule.codec) for name, rule in dimensions.items()}
    if sites is not None:
        content["sites"] = {**_part(sites), "outer": _part(sites.outer)}
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


# The keys of each configuration that version 1 of the form always contains, even at their default.
_KEYS: dict[type[Strict], tuple[str, ...]] = {
    When: ("role", "name", "layers", "min_numel", "max_numel"),
    FeedbackConfig: ("kind", "dtype", "beta", "reset_steps", "lead"),
    DenseConfig: ("kind", "wire"),
    SketchConfig: ("kind", "density", "symbol", "support", "warmup_steps"),
    QuantizedConfig: ("kind", "bits", "block", "rounding"),
    QuantizedParametersConfig: ("kind", "bits", "block", "keep_for_backward"),
    MatrixConfig: ("kind", "bits", "group", "level", "warmup_steps"),
    QuantizedActivationsConfig: ("kind", "bits", "block"),
    DeltaConfig: ("kind", "bits", "block", "rounding"),
    AutoParametersConfig: ("kind", "min_bits", "memory"),
    AutoConfig: ("kind", "min_bits"),
    SitesConfig: ("every", "fragments", "delay", "alpha", "outer"),
    OuterConfig: ("rate", "momentum"),
}
# Options that were removed; their value stays in the form.
_REMOVED: dict[type[Strict], dict[str, Any]] = {
    FeedbackConfig: {"rate": 0.1},
}


def _rule(rule: Rule | ParameterRule) -> dict[str, Any]:
    said = {"when": _part(rule.when), "codec": _part(rule.codec)}
    return said | {"feedback": _part(rule.feedback)} if isinstance(rule, Rule) else said


def _part(part: Strict) -> dict[str, Any]:
    kind = next(kind for kind in type(part).__mro__ if kind in _KEYS)
    said = {key: getattr(part, key) for key in _KEYS[kind]} | _REMOVED.get(kind, {})
    for key, field in type(part).model_fields.items():
        if key not in said and getattr(part, key) != field.default:
            said[key] = getattr(part, key)
    if isinstance(part, MatrixConfig):
        said["level"] = float(part.level)  # its default is an int
    return said
