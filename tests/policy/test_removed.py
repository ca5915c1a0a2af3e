"""A policy that asks for a removed option is told what to write instead."""

from typing import Any

import pytest

from tagc.policy import Policy, PolicyError
from tagc.policy.configs import GRADIENT_CONFIGS, PARAMETER_CONFIGS
from tagc.policy.removed import REMOVED, Removed

DENSITY = {"packed": {"density": 0.1}, "sketch": {"density": 0.1}}


def asking(removed: Removed) -> tuple[str, dict[str, Any]]:
    """Where the option stood, and a policy that has it; the rest of it is valid."""
    asks = {"kind": removed.kind, removed.key: removed.value}
    policy = {"schema": 1, "gradients": [{"when": {}, "codec": {"kind": "dense"}}]}
    for direction, configs in (("gradients", GRADIENT_CONFIGS), ("parameters", PARAMETER_CONFIGS)):
        if removed.kind in [config.model_fields["kind"].default for config in configs]:
            codec = DENSITY.get(removed.kind, {}) | asks
            return f"{direction}[0].codec", policy | {direction: [{"when": {}, "codec": codec}]}
    rule = {"when": {}, "codec": {"kind": "quantized"}, "feedback": asks}
    return "gradients[0].feedback", policy | {"gradients": [rule]}


@pytest.mark.parametrize("removed", REMOVED, ids=lambda r: f"{r.kind}-{r.key}-{r.value}")
def test_the_error_says_what_to_write(removed: Removed):
    where, policy = asking(removed)
    with pytest.raises(PolicyError) as caught:
        Policy.load(policy)
    said = f"<dict>: {where}.{removed.key}: {removed.value!r} was removed: {removed.remedy}"
    assert str(caught.value) == said


def test_another_type_or_kind_was_never_allowed():
    for codec in ({"kind": "delta", "bits": True}, {"kind": "quantized", "bits": 1}):
        rule = {"when": {}, "codec": codec}
        dense = {"when": {}, "codec": {"kind": "dense"}}
        with pytest.raises(PolicyError, match="bits: unknown value"):
            Policy.load({"schema": 1, "gradients": [dense], "parameters": [rule]})
