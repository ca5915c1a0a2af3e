"""The reference of a policy's keys is what the model says."""

from __future__ import annotations

from reference import policy_reference
from tagc.codecs.feedback import FeedbackConfig
from tagc.policy import Tuning
from tagc.policy.policy import Extension
from tagc.policy.rules import (
    ACTIVATION_CONFIGS,
    GRADIENT_CONFIGS,
    PARAMETER_CONFIGS,
    DimensionRule,
    OuterConfig,
    ParameterRule,
    Rule,
    SitesConfig,
    When,
)

PARTS = {
    *(Extension, Rule, ParameterRule, Tuning, When, FeedbackConfig),
    *(DimensionRule, *ACTIVATION_CONFIGS),
    *(SitesConfig, OuterConfig),
    *(*GRADIENT_CONFIGS, *PARAMETER_CONFIGS),
}
REFERENCE = policy_reference()


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def test_every_key_has_a_row_and_a_meaning() -> None:
    keys = {row[0].strip("`") for row in rows(REFERENCE)}
    for part in PARTS:
        assert {field.alias or name for name, field in part.model_fields.items()} <= keys, part
    for row in rows(REFERENCE):
        assert len(row) == 4, row
        assert len(row[3]) > 5, row
    # A row for each key of each part that a file can have.
    assert len(rows(REFERENCE)) == sum(len(part.model_fields) for part in PARTS)
