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
from torch import Tensor

from tagc.codecs.feedback.config import FeedbackConfig
from tagc.ops import Ops


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
        """The most temporary bytes of :meth:`after` on a CPU.

        Args:
            dtype: dtype of the gradients.
        """
        # A buffer in float32 for narrower dtypes; for float16 also a mask of its range, and the
        # values clamped to it.
        each = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 13}[dtype]
        return 0 if self.owner_state is None else each * columns

    @property
    def old_share(self) -> float:
        """Share of the old residual that stays: the operators' ``average``; 0 for none."""
        return 0.0

    def resets_at(self, step: int) -> bool:
        """Whether the residual restarts from zero in ``step``, counted from 0."""
        return False

    @property
    def gain(self) -> float:
        """The largest factor by which outputs of :meth:`after` may exceed every sum so far."""
        return 1.0

    @property
    def measures_share(self) -> bool:
        """Whether :meth:`after` needs the measured share of gradient plus residual in messages."""
        return False

    def weights(self, share: Tensor) -> Tensor | None:
        """The weights of :meth:`after` for a measured share ``[]``; None for no weights."""
        return None

    def constant_weights(self, device: torch.device) -> Tensor | None:
        """The weights of :meth:`after` if nothing is measured; None for no weights."""
        return None

    def prepare(self, ops: Ops) -> None:
        """Compile the kernels of :meth:`after`."""

    def after(
        self,
        decoded: Tensor,
        owner_state: Tensor,
        out: Tensor,
        ops: Ops,
        weights: Tensor | None = None,
    ) -> None:
        """Write the optimizer's gradient to ``out`` ``[columns]``. Where ``decoded`` is not finite,
        ``out`` is NaN and the owner's state becomes 0. Only for rules with an owner's state.

        Args:
            decoded: ``[columns]`` float32, the sum (or average) over ranks; may be ``out``.
            owner_state: ``[columns]`` float32, updated in place.
            weights: see :meth:`weights` and :meth:`constant_weights`.
        """
        raise NotImplementedError
