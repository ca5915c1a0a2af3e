"""Rules: the codec and feedback of the parameters that a condition selects."""

from collections.abc import Sequence
from typing import Any, cast

from pydantic import Field, ValidationInfo, field_validator

from tagc.codecs.config import Strict
from tagc.codecs.feedback import FeedbackConfig
from tagc.policy.conditions import Miss, Near, When
from tagc.policy.configs import AnyGradientConfig, AnyParameterConfig
from tagc.policy.roles import ParamInfo

SMALL = 16384
"""Elements below which a parameter is dense, unless a rule names it or states its `min_numel`."""


class Selection(Strict):
    """The common part of rules for gradients and for parameters."""

    when: When
    """Conditions of the parameters to select; {} selects all."""
    codec: Any

    def miss(self, param: ParamInfo) -> Miss | None:
        """Why the rule does not select the parameter; None if it does.

        A rule that compresses and gives no `name` skips every parameter that is not a matrix (see
        `ParamInfo.no_matrix`; `role: ssm` does select state-space parameters with several
        dimensions). Unless it states `min_numel`, it also skips parameters with fewer than `SMALL`
        elements.
        """
        miss = self.when.miss(param)
        if miss is None and self.codec.compresses and self.when.name is None:
            asked_for = param.ndim > 1 and param.role == "ssm" and self.when.role
            if param.no_matrix and not asked_for:
                return Miss(Near.NO_MATRIX, f"{param.no_matrix}: no rule names it")
            if self.when.min_numel is None and param.numel < SMALL:
                return Miss(Near.SMALL, f"{param.numel:,} elements < {SMALL:,}: see min_numel")
        return miss

    def matches(self, param: ParamInfo) -> bool:
        """Whether the rule selects the parameter."""
        return self.miss(param) is None


class Rule(Selection):
    """One rule: the gradients of the parameters that `when` selects are sent through `codec`, with
    `feedback`. The default `feedback` depends on the codec: `average` if it sends every element,
    `residual` if it selects, `none` if it is dense or rounds stochastically.
    """

    codec: AnyGradientConfig
    """How their gradients are sent."""
    feedback: FeedbackConfig = Field(default=cast(FeedbackConfig, None), validate_default=True)
    """What happens to the part of a gradient that was not sent; the default fits the codec."""

    @field_validator("feedback", mode="before")
    @classmethod
    def _default_feedback(cls, value: object, info: ValidationInfo) -> object:
        codec = info.data.get("codec")  # absent if it was invalid
        if value is None:
            return FeedbackConfig(kind="none" if codec is None else codec.allowed_feedback[0])
        return value

    @field_validator("feedback")
    @classmethod
    def _check_feedback(cls, value: FeedbackConfig, info: ValidationInfo) -> FeedbackConfig:
        codec = info.data.get("codec")
        if codec is None:
            return value
        kinds = codec.allowed_feedback
        if value.kind not in kinds:
            if value.kind in codec.feedback_kinds:
                raise ValueError(
                    f"kind {value.kind!r} does not fit {codec.description}; choose "
                    f"{' or '.join(kinds)}"
                )
            if codec.kind == "dense":
                raise ValueError(
                    f"kind {value.kind!r} has no effect: codec 'dense' sends everything; "
                    "leave feedback out"
                )
            raise ValueError(
                f"kind {value.kind!r} would forget most of what codec {codec.kind!r} does not "
                f"select; choose {' or '.join(kinds)}"
            )
        if codec.shares_support and value.kind == "none":
            raise ValueError("support 'shared' is chosen from residuals, and kind 'none' has none")
        return value


class ParameterRule(Selection):
    """One rule: the parameters that `when` selects are gathered through `codec`."""

    codec: AnyParameterConfig
    """How they are sent in FSDP's all-gather."""


def nearest_miss(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> Miss:
    """Why no rule that compresses selects the parameter: the miss of the nearest rule."""
    misses = [rule.miss(param) for rule in rules if rule.codec.compresses]
    return max(
        (m for m in misses if m is not None), default=Miss(Near.NOTHING, "no rule compresses")
    )


def first_match(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> int | None:
    """Index of the first rule that selects the parameter; None is dense."""
    for index, rule in enumerate(rules):
        if rule.matches(param):
            return index
    return None


def check_replicated(rule: Rule) -> Rule:
    """Refuse a rule for replicas that cannot be followed there.

    Raises:
        ValueError: with the key and the reason.
    """
    if rule.codec.shares_support:
        raise ValueError(
            "codec.support 'shared' is chosen by a shard's owner, and replicas have none"
        )
    return check_lead(rule)


def check_lead(rule: Rule) -> Rule:
    """Refuse a rule for gradients whose average would differ from rank to rank.

    Raises:
        ValueError: with the key and the reason.
    """
    if rule.feedback.lead == "measured":
        raise ValueError(
            "feedback.lead 'measured' differs from rank to rank, and replicas must stay equal; "
            "give a number"
        )
    return rule
