"""Feedback: what happens to the part of a gradient that a codec did not send.

A kind is a subclass of :class:`~tagc.codecs.feedback.rule.FeedbackRule`, listed in ``RULES``.
"""

from __future__ import annotations

from tagc.codecs.feedback.average import AverageFeedback
from tagc.codecs.feedback.config import FeedbackConfig
from tagc.codecs.feedback.error import ErrorFeedback, LeadFeedback
from tagc.codecs.feedback.rule import FeedbackRule

RULES: tuple[type[FeedbackRule], ...] = (ErrorFeedback, AverageFeedback, LeadFeedback)

OWNER_STATES = tuple(rule.owner_state for rule in RULES if rule.owner_state is not None)
"""Names of the owners' states in checkpoints."""

OWNER_RESIDUAL = "owner_residual"
"""Name, in checkpoints, of the residual of the sums that owners send in two shots."""


def plan_feedback(config: FeedbackConfig) -> FeedbackRule | None:
    """The rule for a policy's settings; None for the kind ``none``, which stores nothing."""
    if config.kind == "none":
        return None
    (planned,) = (planned for rule in RULES if (planned := rule.of(config)) is not None)
    return planned
