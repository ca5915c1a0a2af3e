"""Feedback: what becomes of the part of a gradient that a codec did not send.

A kind is a class of :class:`~tagc.codecs.feedback.rule.FeedbackRule` and a line in ``_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tagc.codecs.feedback.average import AverageFeedback
from tagc.codecs.feedback.config import FeedbackConfig
from tagc.codecs.feedback.error import ErrorFeedback, LeadFeedback
from tagc.codecs.feedback.momentum import MomentumFeedback
from tagc.codecs.feedback.residual import Residual
from tagc.codecs.feedback.rule import FeedbackRule
from tagc.codecs.feedback.segment import SegmentFeedback

__all__ = [
    "OWNER_STATES",
    "AverageFeedback",
    "ErrorFeedback",
    "FeedbackConfig",
    "FeedbackRule",
    "LeadFeedback",
    "MomentumFeedback",
    "Residual",
    "SegmentFeedback",
    "plan_feedback",
]


OWNER_STATES = tuple(
    rule.owner_state
    for rule in (ErrorFeedback, AverageFeedback, MomentumFeedback, LeadFeedback)
    if rule.owner_state is not None
)
"""What checkpoints call what owners keep."""


def _error(config: FeedbackConfig, dtype: torch.dtype) -> FeedbackRule:
    if config.lead < 1:
        return LeadFeedback(dtype=dtype, lead=config.lead)
    return ErrorFeedback(dtype=dtype)


_RULES: Mapping[str, Callable[[FeedbackConfig, torch.dtype], FeedbackRule]] = {
    "residual": _error,
    "average": lambda c, dtype: AverageFeedback(
        dtype=dtype, beta=c.beta, reset_steps=c.reset_steps
    ),
    "momentum": lambda c, dtype: MomentumFeedback(dtype=dtype, rate=c.rate),
}


def plan_feedback(config: FeedbackConfig) -> FeedbackRule | None:
    """The rule that a policy asks for; None for the kind ``none``, which stores nothing."""
    if config.kind == "none":
        return None
    return _RULES[config.kind](config, getattr(torch, config.dtype))
