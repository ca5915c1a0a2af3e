"""Rules: what becomes of the parameters that their conditions select."""

from collections.abc import Sequence
from typing import Any, cast

from pydantic import Field, ValidationInfo, field_validator

from tagc.codecs.config import Strict
from tagc.codecs.feedback import FeedbackConfig
from tagc.policy.conditions import When
from tagc.policy.configs import AnyGradientConfig, AnyParameterConfig
from tagc.policy.roles import ParamInfo

SMALL = 16384
"""Elements below which a parameter is dense, unless a rule names it or states its `min_numel`."""


class Selection(Strict):
    """What rules for gradients and for parameters have in common."""

    when: When
    """Which parameters it selects; {} for all."""
    codec: Any

    def matches(self, param: ParamInfo) -> bool:
        """Whether the rule selects the parameter.

        A rule that compresses and gives no `name` passes over every parameter with fewer than two
        dimensions, and, unless it states `min_numel`, over those with fewer than `SMALL` elements.
        """
        if self.codec.compresses and self.when.name is None:
            if param.ndim < 2:
                return False
            if self.when.min_numel is None and param.numel < SMALL:
                return False
        return self.when.matches(param)


class Rule(Selection):
    """One rule: the gradients of the parameters that `when` selects go through `codec`, with
    `feedback`. Without `feedback`, a codec gets the first kind of those that it can have:
    `average` if it sends every element, `residual` if it selects, `none` if it is dense.
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
            return FeedbackConfig(kind="none" if codec is None else codec.feedback_kinds[0])
        return value

    @field_validator("feedback")
    @classmethod
    def _check_feedback(cls, value: FeedbackConfig, info: ValidationInfo) -> FeedbackConfig:
        codec = info.data.get("codec")
        if codec is None:
            return value
        kinds = codec.feedback_kinds
        if value.kind not in kinds:
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


def first_match(rules: Sequence[Rule | ParameterRule], param: ParamInfo) -> int | None:
    """Index of the first rule that selects the parameter; None is dense."""
    for index, rule in enumerate(rules):
        if rule.matches(param):
            return index
    return None
