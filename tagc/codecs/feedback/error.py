"""Feedback ``residual``: classic error feedback, with a lead or without.

A codec whose messages carry the share ``K`` of what is owed delivers ``K * g`` in the step,
``K * (1 - K) * g`` in the next, and so on: a moving average, late by ``(1 - K) / K`` steps. That is
little beside a momentum's ten, but it comes on top of it: with momentum ``b`` an optimizer is
stable up to a curvature of ``2 (1 + b) / (1 - b)`` over the learning rate, 38 for 0.9, and with
gradients a step late up to 1. So with a *lead* the owner inverts the average, with ``Q`` the last
sum it got::

    hand out (sum of C(x) - (1 - K) * Q) / K, Q <- sum of C(x)        Q is zero before the first

What was handed out so far then is what was sent, plus ``(1 - K) / K * Q``: the owner is ahead by
what the residuals of all ranks hold on average. Quantization noise grows by ``1 / K``, but only
where it changes from step to step, which a momentum averages out.

``K`` depends on the codec, and on how gradients are distributed: 0.35 for the largest of 8 if they
are Gaussian, half of that where most are near zero. So it can be measured: what a rank owes before
it encodes, ``x``, and what it sends, ``C(x)``, are there, and ``K = E[C(x) x] / E[x x]`` is the
slope of their regression. Every owner goes by what it measured itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tagc.codecs.feedback.config import FeedbackConfig
from tagc.codecs.feedback.rule import FeedbackRule
from tagc.ops import Ops


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(FeedbackRule):
    """What was not sent is added to the next gradient."""

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        """See :meth:`FeedbackRule.of`."""
        return (
            cls(dtype=config.stored_dtype)
            if config.kind == "residual" and config.lead == 1
            else None
        )


LEAST_SHARE = 0.1
"""Taken where a smaller share is measured: what is handed out grows by its inverse."""


@dataclass(frozen=True, kw_only=True)
class LeadFeedback(FeedbackRule):
    """Likewise, and the owner undoes the lag.

    Attributes:
        lead: ``K``, the share of what is owed that a message is taken to carry, below 1; None where
            it is measured.
    """

    owner_state: ClassVar[str | None] = "sent"
    note: ClassVar[str | None] = (
        "a lead hands out noisier gradients, which an optimizer like Adam answers with smaller "
        "steps: call compressor.keep_rates(optimizer), which measures by how much and undoes it, "
        "or tune the learning rate anew (docs/quality.md)"
    )

    lead: float | None

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        """See :meth:`FeedbackRule.of`."""
        if config.kind != "residual" or config.lead == 1:
            return None
        lead = None if isinstance(config.lead, str) else config.lead
        return cls(dtype=config.stored_dtype, lead=lead)

    @property
    def measures_share(self) -> bool:
        """See :attr:`FeedbackRule.measures_share`."""
        return self.lead is None

    @property
    def gain(self) -> float:
        """See :attr:`FeedbackRule.gain`: of a sum that changes its sign."""
        lead = self.lead or LEAST_SHARE
        return (2 - lead) / lead

    def weights(self, share: Tensor) -> Tensor | None:
        """See :meth:`FeedbackRule.weights`: ``1 - K`` and ``K``."""
        lead = share.clamp(LEAST_SHARE, 1.0)
        return torch.stack((1 - lead, lead))

    def constant_weights(self, device: torch.device) -> Tensor | None:
        """See :meth:`FeedbackRule.constant_weights`: ``1 - K`` and ``K``."""
        if self.lead is None:
            return None
        return torch.tensor([1 - self.lead, self.lead], dtype=torch.float32, device=device)

    def prepare(self, ops: Ops) -> None:
        """See :meth:`FeedbackRule.prepare`."""
        ops.prepare_lag()

    def after(
        self,
        decoded: Tensor,
        owner_state: Tensor,
        out: Tensor,
        ops: Ops,
        weights: Tensor | None = None,
    ) -> None:
        """See :meth:`FeedbackRule.after`."""
        assert weights is not None
        ops.undo_lag(decoded, owner_state, out, weights)
