"""Feedback ``residual``: classic error feedback, with or without a lead.

If a codec's messages carry the share ``K`` of gradient plus residual, a gradient ``g`` arrives as
``K * g`` in its step, ``K * (1 - K) * g`` in the next, and so on: a moving average, late by
``(1 - K) / K`` steps. This lag is small beside the ten steps of a momentum, but it adds to them.
With momentum ``b``, an optimizer is stable up to a curvature of ``2 (1 + b) / (1 - b)`` over the
learning rate: 38 for 0.9, but only 1 if gradients are one step late. With a *lead*, the owner
therefore inverts the average. ``Q`` is the last sum that it received::

    hand out (sum of C(x) - (1 - K) * Q) / K, Q <- sum of C(x)        Q is zero before the first

In total, the owner has then handed out what was sent, plus ``(1 - K) / K * Q``. On average, this
surplus equals the residuals of all ranks. Quantization noise grows by ``1 / K``, but only where it
changes from step to step, and a momentum averages that out.

``K`` depends on the codec and on the distribution of gradients: 0.35 for the largest of 8 if they
are Gaussian, half of that if most are near zero. So it can be measured. A rank knows its gradient
plus residual before it encodes, ``x``, and what it sends, ``C(x)``. The slope of their regression
is ``K = E[C(x) x] / E[x x]``. Every owner uses its own measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tagc.codecs.feedback.config import FeedbackConfig
from tagc.codecs.feedback.rule import FeedbackRule
from tagc.ops.sampling import LEAST_SHARE


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(FeedbackRule):
    """Adds what was not sent to the next gradient."""

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        return (
            cls(dtype=config.stored_dtype)
            if config.kind == "residual" and config.lead == 1
            else None
        )


@dataclass(frozen=True, kw_only=True)
class LeadFeedback(FeedbackRule):
    """Error feedback whose lag the owner undoes.

    Attributes:
        lead: ``K``, the share of gradient plus residual that a message is assumed to carry, below
            1; None if it is measured.
    """

    owner_state: ClassVar[str | None] = "sent"
    note: ClassVar[str | None] = (
        "a lead makes gradients noisier, so an optimizer like Adam takes smaller steps: call "
        "compressor.keep_rates(optimizer), which measures how much smaller and undoes it, or "
        "retune the learning rate (docs/quality.md)"
    )

    lead: float | None

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        if config.kind != "residual" or config.lead == 1:
            return None
        lead = None if isinstance(config.lead, str) else config.lead
        return cls(dtype=config.stored_dtype, lead=lead)

    @property
    def gain(self) -> float:
        """See :attr:`FeedbackRule.gain`: the worst case is a sum that changes its sign."""
        lead = self.lead or LEAST_SHARE
        return (2 - lead) / lead
