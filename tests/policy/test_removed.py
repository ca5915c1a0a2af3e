"""A policy that asks for a removed option is told what to write instead."""

import re
from pathlib import Path
from typing import Any

import pytest

from tagc.policy import Policy, PolicyError, policies
from tagc.policy.configs import GRADIENT_CONFIGS, PARAMETER_CONFIGS
from tagc.policy.removed import POLICIES, REMOVED, Removed

DENSITY = {"density": 0.1}


def asking(removed: Removed) -> tuple[str, dict[str, Any]]:
    """Where the option stood, and a policy that has it; the rest of it is valid."""
    kind = {"kind": removed.kind} if removed.kind else {}
    asks = {**kind, removed.key: removed.value}
    policy = {"schema": 1, "gradients": [{"when": {}, "codec": {"kind": "dense"}}]}
    for direction, configs in (("gradients", GRADIENT_CONFIGS), ("parameters", PARAMETER_CONFIGS)):
        if removed.kind in [config.model_fields["kind"].default for config in configs]:
            codec = (DENSITY if removed.kind == "sketch" else {}) | asks
            return f"{direction}[0].codec", policy | {direction: [{"when": {}, "codec": codec}]}
    if removed.kind == "packed":  # the codec itself
        return "gradients[0].codec", policy | {"gradients": [{"when": {}, "codec": asks}]}
    rule = {"when": {}, "codec": {"kind": "quantized"}, "feedback": asks}
    return "gradients[0].feedback", policy | {"gradients": [rule]}


@pytest.mark.parametrize("removed", REMOVED, ids=lambda r: f"{r.kind}-{r.key}-{r.value}")
def test_the_error_says_what_to_write(removed: Removed):
    where, policy = asking(removed)
    with pytest.raises(PolicyError) as caught:
        Policy.load(policy)
    said = f"<dict>: {where}.{removed.key}: {removed.value!r} was removed: {removed.remedy}"
    assert str(caught.value) == said


# What these policies' hashes were.
HASHES = {
    "all": "d3dbc8d22ebc10d02ac6eeaddd6ea271d1a79739a3b1c8d3d84c57e370c4e858",
    "mlp-only": "1f084e8b94b493e7a24c1e25ff42dc2393d5f276f3cb7125f4a1e48ce9a2ddcd",
    "non-attn": "8449000d65e3e18416d8d9f6a7e1eda7428f33ea2b0122f5b0574e6efd51be92",
}


def test_a_removed_policy_is_told_as_a_file(tmp_path: Path):
    """With the hash that it had, so that checkpoints resume exactly."""
    assert not {*POLICIES} & {*policies()}
    for name, remedy in POLICIES.items():
        with pytest.raises(PolicyError) as caught:
            Policy.load(name)
        assert str(caught.value) == f"the built-in policy {name!r} was removed: {remedy}"
        with pytest.raises(PolicyError, match=f"extends: the built-in policy {name!r} was removed"):
            Policy.load({"schema": 1, "extends": name})
        said, _, lines = remedy.partition("\n")
        if lines:
            (tmp_path / "mine.yaml").write_text(lines)
            assert Policy.load(tmp_path / "mine.yaml").hash == HASHES[name]
        else:
            for other in re.findall("take '(.+?)'", said):
                Policy.load(other)
