"""Rules: what becomes of the parameters that their conditions select."""

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
    """What rules for gradients and for parameters have in common."""

    when: When
    """Which parameters it selects; {} for all."""
    codec: Any

    def miss(self, param: ParamInfo) -> Miss | None:
        """Why the rule does not select the parameter; None if it does.

        A rule that compresses and gives no `name` passes over every parameter that is no matrix
        (see `ParamInfo.no_matrix`; state-space parameters only if it gives no `role` either), and,
        unless it states `min_numel`, over those with fewer than `SMALL` elements.
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
    """One rule: the gradients of the parameters that `when` selects go through `codec`, with
    `feedback`. Without `feedback`, a codec gets the first kind of those that it can have:
    `average` if it sends every element, `residual` if it selects, `none` if it is dense or
    rounds by chance.
    """

    codec: AnyGradientConfig
    """How their gradients travel."""
    feedback: FeedbackConfig = Field(default=cast(FeedbackConfig, None), validate_default=True)
    """What becomes of the part of a gradient that was not sent; by default what fits the codec."""

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
                    f"kind {value.kind!r} does not fit {codec.spelled}; choose {' or '.join(kinds)}"
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
    """How they travel in FSDP's all-gather."""


def nearest_miss(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> Miss:
    """Why none of the rules that compress selects the parameter: of the nearest of them."""
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
