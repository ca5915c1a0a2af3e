"""The feedback of one segment on one rank: its rule, and what that stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tagc.codecs.feedback.residual import Residual
from tagc.codecs.feedback.rule import FeedbackRule
from tagc.codecs.feedback.share import MeasuredShare
from tagc.ops import Ops


class SegmentFeedback:
    """What a codec calls before and after its operators.

    Attributes:
        rule: None where nothing is stored.
        residual: of this rank, a row for every destination; likewise.
        owner_state: what the owner of a shard keeps of it, ``[columns]`` float32; None where its
            kind keeps nothing.
        share: of what this rank owes that its messages carry; None where nobody asks.
    """

    def __init__(
        self,
        rule: FeedbackRule | None,
        *,
        destinations: int,
        columns: int,
        ops: Ops,
        device: torch.device,
        overshoot: float = 0.0,
    ) -> None:
        """New state.

        Args:
            overshoot: see :attr:`tagc.codecs.CodecPlan.overshoot`.
        """
        self.rule = rule
        # How far beyond float16's range a sum may be that is no overflow.
        self._reach = (1 + overshoot) * (1.0 if rule is None else rule.gain)
        self._ops = ops
        self._weights = None if rule is None else rule.constant_weights(device)
        self.residual: Residual | None = None
        self.owner_state: Tensor | None = None
        self.share: MeasuredShare | None = None
        if rule is not None:
            self.residual = Residual(destinations, columns, rule.dtype, ops, device)
            if rule.owner_state is not None:
                self.owner_state = torch.zeros(columns, dtype=torch.float32, device=device)
            if rule.measures_share:
                self.share = MeasuredShare(device)
                self._weights = rule.weights(self.share.value)
                # Updates of the share that these weights know of.
                self._weights_at = self.share.updates
            rule.prepare(ops)

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """Of the residual in a step; None where there is none."""
        return None if self.rule is None else self.rule.working_dtype

    @property
    def old_share(self) -> float:
        """See :attr:`FeedbackRule.old_share`."""
        return 0.0 if self.rule is None else self.rule.old_share

    @contextmanager
    def opened(self, gradient: Tensor, step: int = 0) -> Iterator[Tensor | None]:
        """The residual ``[D, columns]``, to be changed in place by the codec's operator; None where
        there is none.

        Args:
            gradient: ``[D, columns]``.
            step: encodings so far.
        """
        if self.rule is None or self.residual is None:
            yield None
            return
        if self.rule.resets_at(step):
            self.residual.zero_()
        with self.residual.opened() as residual:
            if self.share is not None:
                self.share.before(gradient, residual)
            yield residual
            if self.share is not None:
                self.share.after(residual)

    def decode_buffer(self, out: Tensor) -> Tensor:
        """Where the codec should decode to, for :meth:`correct`: ``out`` ``[columns]``, or as much
        in float32."""
        if out.dtype == torch.float32 or (self.owner_state is None and out.dtype != torch.float16):
            return out
        return torch.empty_like(out, dtype=torch.float32)

    def correct(self, decoded: Tensor, out: Tensor) -> None:
        """Write what the optimizer gets to ``out`` ``[columns]``; NaN where ``decoded`` is not
        finite, which counts as 0 in the owner's state. In float16, whose range a loss scale makes
        gradients fill, what exceeds it by no more than codes and residuals can is the largest
        number, and no overflow.

        Args:
            decoded: what :meth:`decode_buffer` gave, decoded.
        """
        wide = decoded
        if self.owner_state is not None and self.rule is not None:
            wide = decoded if out.dtype == torch.float16 else out
            self._follow_share(self.rule)
            self.rule.after(decoded, self.owner_state, wide, self._ops, self._weights)
        if wide is not out:
            _saturate(wide, out, self._reach)

    def _follow_share(self, rule: FeedbackRule) -> None:
        """Make the weights anew if the share was measured again."""
        if self.share is None or self._weights_at == self.share.updates:
            return
        weights = rule.weights(self.share.value)
        assert self._weights is not None
        assert weights is not None
        self._weights.copy_(weights)
        self._weights_at = self.share.updates


def _saturate(wide: Tensor, out: Tensor, reach: float) -> None:
    """Write ``wide`` (float32) to ``out``, what is within ``reach`` times its range as a number."""
    largest = torch.finfo(out.dtype).max
    near = wide.abs() <= reach * largest
    out.copy_(torch.where(near, wide.clamp(-largest, largest), wide))
