"""Feedback ``average``: LoCo (arXiv 2407.04480), in DeepSpeed's form.

``x = g + e``; send ``C(x)``; ``e <- beta * e + (1 - beta) * (x - C(x))``. ``e`` restarts from zero
every ``reset_steps`` reductions. It forgets by design.
"""

from __future__ import annotations

from dataclasses import dataclass

from tagc.codecs.feedback.config import FeedbackConfig
from tagc.codecs.feedback.rule import FeedbackRule


@dataclass(frozen=True, kw_only=True)
class AverageFeedback(FeedbackRule):
    """Adds a moving average of what was not sent to the next gradient.

    Attributes:
        beta: share of the old residual that stays.
        reset_steps: number of reductions after which the residual restarts from zero.
    """

    beta: float
    reset_steps: int

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        if config.kind != "average":
            return None
        return cls(dtype=config.stored_dtype, beta=config.beta, reset_steps=config.reset_steps)

    @property
    def restarts(self) -> int | None:
        return self.reset_steps

    @property
    def old_share(self) -> float:
        return self.beta
