"""The contract of feedback: a rule for what a codec did not send.

With ``g`` a rank's gradient, ``e`` its residual and ``C`` the codec, the plain rule is::

    x = g + e; send C(x); e <- x - C(x)

A codec's operator does that in one pass. A kind may change what the operator keeps
(``old_share``), and what the owner of a shard computes from the sum (``after``). The owner may keep
a state for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tagc.codecs.feedback.config import FeedbackConfig


@dataclass(frozen=True, kw_only=True)
class FeedbackRule:
    """The plain rule. Subclasses change parts of it.

    Attributes:
        dtype: dtype of the residual.
    """

    owner_state: ClassVar[str | None] = None
    """Name of the owner's state in checkpoints; None if the owner keeps nothing."""
    note: ClassVar[str | None] = None
    """Advice about the rule that a plan gives the user; None for none."""

    dtype: torch.dtype

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        """The rule for a policy's settings; None if another class implements them."""
        raise NotImplementedError

    def row_bytes(self, columns: int) -> int:
        """Bytes stored for a row of the residual."""
        return self.dtype.itemsize * columns

    @property
    def owner_bytes(self) -> int:
        """Bytes that an owner stores for an element of its shard."""
        return 0 if self.owner_state is None else 4

    def scratch_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """The most temporary bytes on a CPU after decoding.

        Args:
            dtype: dtype of the gradients.
        """
        # A mask of the range of float16, and the values clamped to it.
        each = 9 if dtype == torch.float16 else 0
        return 0 if self.owner_state is None else each * columns

    @property
    def old_share(self) -> float:
        """Share of the old residual that stays: the operators' ``average``; 0 for none."""
        return 0.0

    @property
    def restarts(self) -> int | None:
        """After how many reductions the residual restarts from zero; None for never."""
        return None

    @property
    def gain(self) -> float:
        """The largest factor by which the optimizer's gradients may exceed every sum so far."""
        return 1.0
