"""The canonical form of a policy, version 1: what :attr:`tagc.Policy.hash` is the SHA-256 of.

Checkpoints have that hash, and an exact resume needs the same one. So the form has names of its
own, and a rename in the code changes nothing in it. Keys that policies get later are left out
where they have their default, as ``inside`` and ``roles`` are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tagc.codecs.config import CodecConfig
from tagc.codecs.delta import DeltaConfig
from tagc.codecs.dense import DenseConfig
from tagc.codecs.feedback import FeedbackConfig
from tagc.codecs.matrix import MatrixConfig
from tagc.codecs.packed import PackedConfig
from tagc.codecs.quantized import QuantizedConfig, QuantizedParametersConfig
from tagc.codecs.sketch import SketchConfig
from tagc.policy.conditions import When
from tagc.policy.configs import AutoConfig, AutoParametersConfig
from tagc.policy.roles import Role
from tagc.policy.rules import ParameterRule, Rule


def canonical(
    *,
    gradients: Sequence[Rule],
    parameters: Sequence[ParameterRule],
    replicas: Sequence[Rule],
    inside: str,
    roles: Mapping[Role, Sequence[str]],
) -> str:
    """All that a policy changes in a run: nothing that it only says, such as its name."""
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
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _rule(rule: Rule | ParameterRule) -> dict[str, Any]:
    said = {"when": _when(rule.when), "codec": _codec(rule.codec)}
    return said | {"feedback": _feedback(rule.feedback)} if isinstance(rule, Rule) else said


def _when(when: When) -> dict[str, Any]:
    return {
        "role": when.role,
        "name": when.name,
        "layers": when.layers,
        "min_numel": when.min_numel,
        "max_numel": when.max_numel,
    }


def _codec(codec: CodecConfig) -> dict[str, Any]:
    match codec:
        case DenseConfig():
            return {"kind": "dense", "wire": codec.wire}
        case SketchConfig():
            return {
                "kind": "sketch",
                "density": codec.density,
                "symbol": codec.symbol,
                "support": codec.support,
                "warmup_steps": codec.warmup_steps,
            }
        case PackedConfig():
            return {
                "kind": "packed",
                "density": codec.density,
                "bits": codec.bits,
                "group": codec.group,
                "block": codec.block,
                "support": "own",  # of an option that was removed
                "warmup_steps": codec.warmup_steps,
            }
        case QuantizedConfig():
            return {
                "kind": "quantized",
                "bits": codec.bits,
                "block": codec.block,
                "rounding": codec.rounding,
            }
        case QuantizedParametersConfig():
            return {
                "kind": "quantized",
                "bits": codec.bits,
                "block": codec.block,
                "keep_for_backward": codec.keep_for_backward,
            }
        case MatrixConfig():
            return {
                "kind": "matrix",
                "bits": codec.bits,
                "group": codec.group,
                "level": float(codec.level),
                "warmup_steps": codec.warmup_steps,
            }
        case DeltaConfig():
            return {
                "kind": "delta",
                "bits": codec.bits,
                "block": codec.block,
                "rounding": codec.rounding,
            }
        case AutoParametersConfig():
            return {"kind": "auto", "min_bits": codec.min_bits, "memory": codec.memory}
        case AutoConfig():
            return {"kind": "auto", "min_bits": codec.min_bits}
    raise AssertionError(f"{type(codec).__name__} has no canonical form")


def _feedback(feedback: FeedbackConfig) -> dict[str, Any]:
    return {
        "kind": feedback.kind,
        "dtype": feedback.dtype,
        "beta": feedback.beta,
        "reset_steps": feedback.reset_steps,
        "rate": 0.1,  # of a kind that was removed
        "lead": feedback.lead,
    }
