"""What a kind of feedback is: a rule for what a codec did not send.

With ``g`` a rank's gradient, ``e`` its residual and ``C`` the codec, the plain rule is::

    x = g + e; send C(x); e <- x - C(x)

A codec's operator does that in one pass. A kind may change what the operator keeps
(``old_share``), and what the owner of a shard makes of the sum (``after``), for which the owner
may keep a state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tagc.codecs.feedback.config import FeedbackConfig
from tagc.ops import Ops
from tagc.ops.blocks import BlockLayout


def stored_layout(columns: int) -> BlockLayout:
    """How a row of a residual is stored in 8 bits."""
    return BlockLayout(numel=columns, bits=8)


@dataclass(frozen=True, kw_only=True)
class FeedbackRule:
    """The plain rule, and what other kinds may change of it.

    Attributes:
        dtype: of the stored residual; int8 with a scale for every 256 elements.
    """

    owner_state: ClassVar[str | None] = None
    """What a checkpoint calls the owner's state; None where the owner keeps nothing."""
    note: ClassVar[str | None] = None
    """What a plan tells the user about it."""

    dtype: torch.dtype

    @classmethod
    def of(cls, config: FeedbackConfig) -> FeedbackRule | None:
        """The rule that a policy asks for; None where that is another class's."""
        raise NotImplementedError

    @property
    def working_dtype(self) -> torch.dtype:
        """Of the residual in a step."""
        return torch.float32 if self.dtype == torch.int8 else self.dtype

    def row_bytes(self, columns: int) -> int:
        """Stored for a row of the residual."""
        if self.dtype == torch.int8:
            return 4 * stored_layout(columns).words
        return self.dtype.itemsize * columns

    @property
    def owner_bytes(self) -> int:
        """Stored for an element of the own shard."""
        return 0 if self.owner_state is None else 4

    def scratch_bytes(self, destinations: int, columns: int, dtype: torch.dtype) -> int:
        """Taken for a moment on a CPU, at most: a residual in 8 bits is opened in float32; what the
        owner makes of a sum.

        Args:
            dtype: of the gradients.
        """
        opened = 4 * destinations * columns if self.dtype == torch.int8 else 0
        # A buffer in float32 for narrower dtypes; for float16 a mask of its range, with what is
        # kept inside of it.
        each = {torch.float32: 0, torch.bfloat16: 4, torch.float16: 13}[dtype]
        return max(opened, 0 if self.owner_state is None else each * columns)

    @property
    def old_share(self) -> float:
        """Share of the old residual that stays, the operators' ``average``; 0 for none."""
        return 0.0

    def resets_at(self, step: int) -> bool:
        """Whether the residual starts from zero in this step, of those counted from 0."""
        return False

    @property
    def gain(self) -> float:
        """By what factor :meth:`after` may hand out more than any sum that came in."""
        return 1.0

    @property
    def measures_share(self) -> bool:
        """Whether :meth:`after` needs the share of what is owed that a message carries."""
        return False

    def weights(self, share: Tensor) -> Tensor | None:
        """What :meth:`after` takes from a share that was measured, ``[]``; None for nothing."""
        return None

    def constant_weights(self, device: torch.device) -> Tensor | None:
        """What :meth:`after` takes where nothing is measured, made once; None for nothing."""
        return None

    def prepare(self, ops: Ops) -> None:
        """Compile what :meth:`after` will need."""

    def after(
        self,
        decoded: Tensor,
        owner_state: Tensor,
        out: Tensor,
        ops: Ops,
        weights: Tensor | None = None,
    ) -> None:
        """Write to ``out`` ``[columns]`` what the optimizer gets: NaN where ``decoded`` is not
        finite, which counts as 0 in the owner's state. Only where there is one.

        Args:
            decoded: ``[columns]`` float32, the sum (or average) over ranks; may be ``out``.
            owner_state: ``[columns]`` float32, updated in place.
            weights: see :meth:`weights` and :meth:`constant_weights`.
        """
        raise NotImplementedError
