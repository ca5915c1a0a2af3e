"""Feedback ``momentum``: what travels is a moving average of the gradient.

With ``G`` the owner's part of that average::

    e <- (1 - rate) * e + rate * g        every rank, before the codec
    send C(e), e <- e - C(e)              the codec, as for the kind ``residual``
    G <- (1 - rate) * G + sum of C(e)     the owner, who hands out G

So ``G`` plus the sum of the residuals is the moving average of the sum of the gradients: what has
not been sent yet decays like everything else, and no old gradient arrives late at full size.
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
class MomentumFeedback(FeedbackRule):
    """The owner hands out a moving average.

    Attributes:
        rate: weight of the new gradient in it.
    """

    owner_state: ClassVar[str | None] = "average"
    follows_dense: ClassVar[bool] = True
    note: ClassVar[str | None] = (
        "feedback 'momentum' hands out a moving average of gradients: set the optimizer's own "
        "first momentum to 0, as with AdamW(betas=(0.0, 0.95)), and tune its learning rate anew"
    )

    rate: float

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        """See :meth:`FeedbackRule.of`."""
        return (
            cls(dtype=config.stored_dtype, rate=config.rate) if config.kind == "momentum" else None
        )

    @property
    def gradient_scale(self) -> float:
        """See :attr:`FeedbackRule.gradient_scale`."""
        return self.rate

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Always float32."""
        return torch.float32

    def scratch_bytes(
        self, destinations: int, columns: int, dtype: torch.dtype, *, reference: bool
    ) -> int:
        """See :meth:`FeedbackRule.scratch_bytes`: or the gradient's share, of one in float32."""
        own = (4 if dtype == torch.float32 else 8) * destinations * columns
        opened = 4 * destinations * columns if self.dtype == torch.int8 else 0
        found = super().scratch_bytes(destinations, columns, dtype, reference=reference)
        return max(found, own + opened)

    def before(self, gradient: Tensor, residual: Tensor) -> Tensor:
        """``rate * gradient`` in float32; the residual decays in place."""
        residual.mul_(1 - self.rate)
        return gradient.float() * self.rate

    def after(
        self,
        decoded: Tensor,
        owner_state: Tensor,
        out: Tensor,
        ops: Ops,
        weights: Tensor | None = None,
    ) -> None:
        """See :meth:`FeedbackRule.after`."""
        lost = ~decoded.isfinite()
        out.copy_(owner_state.mul_(1 - self.rate).add_(decoded.masked_fill(lost, 0.0)))
        out.masked_fill_(lost, float("nan"))

    def after_dense(self, out: Tensor, owner_state: Tensor, ops: Ops) -> None:
        """The moving average follows the dense sum."""
        self.after(out.float() * self.rate, owner_state, out, ops)
