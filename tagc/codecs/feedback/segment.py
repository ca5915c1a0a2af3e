"""The feedback of one segment on one rank: its rule and its state."""

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
    """A segment's rule and state. Codecs call it before and after their operators.

    Attributes:
        rule: the feedback rule; None if nothing is stored.
        residual: this rank's residual, with a row for every destination; None if nothing is stored.
        owner_state: the state of the shard's owner, ``[columns]`` float32; None if the rule has
            none.
        share: the share of gradient plus residual that this rank's messages carry; None if the rule
            does not measure it.
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
        """Start with empty state.

        Args:
            overshoot: see :attr:`tagc.codecs.CodecPlan.overshoot`.
        """
        self.rule = rule
        # A sum up to this many times float16's largest number is no overflow.
        self._reach = (1 + overshoot) * (1.0 if rule is None else rule.gain)
        self._ops = ops
        self._weights = None if rule is None else rule.constant_weights(device)
        self.residual: Residual | None = None
        self.owner_state: Tensor | None = None
        self.share: MeasuredShare | None = None
        if rule is not None:
            self.residual = Residual(destinations, columns, rule.dtype, device)
            if rule.owner_state is not None:
                self.owner_state = torch.zeros(columns, dtype=torch.float32, device=device)
            if rule.measures_share:
                self.share = MeasuredShare(device)
                self._weights = rule.weights(self.share.value)
                # The share's ``updates`` when the weights were made.
                self._weights_at = self.share.updates
            rule.prepare(ops)

    @property
    def residual_dtype(self) -> torch.dtype | None:
        """Dtype of the residual; None if there is no residual."""
        return None if self.rule is None else self.rule.dtype

    @property
    def old_share(self) -> float:
        return 0.0 if self.rule is None else self.rule.old_share

    @contextmanager
    def opened(self, gradient: Tensor, step: int = 0) -> Iterator[Tensor | None]:
        """The residual ``[D, columns]``, which the codec's operator changes in place; None if there
        is no residual.

        Args:
            gradient: ``[D, columns]``.
            step: how many encodings came before.
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
        """The buffer that the codec decodes into for :meth:`correct`: ``out`` ``[columns]``, or a
        new one of its size in float32."""
        if out.dtype == torch.float32 or (self.owner_state is None and out.dtype != torch.float16):
            return out
        return torch.empty_like(out, dtype=torch.float32)

    def correct(self, decoded: Tensor, out: Tensor) -> None:
        """Write the optimizer's gradient to ``out`` ``[columns]``. With an owner's state, ``out``
        is NaN where ``decoded`` is not finite, and the state becomes 0 there.

        With a loss scale, gradients fill the range of float16. So in float16, values that exceed
        the range by no more than codes and residuals can cause become the largest number instead of
        an overflow.

        Args:
            decoded: the buffer from :meth:`decode_buffer`, with the decoded sum.
        """
        wide = decoded
        if self.owner_state is not None and self.rule is not None:
            wide = decoded if out.dtype == torch.float16 else out
            self._follow_share(self.rule)
            self.rule.after(decoded, self.owner_state, wide, self._ops, self._weights)
        if wide is not out:
            _saturate(wide, out, self._reach)

    def _follow_share(self, rule: FeedbackRule) -> None:
        """Update the weights if the share was measured again."""
        if self.share is None or self._weights_at == self.share.updates:
            return
        weights = rule.weights(self.share.value)
        assert self._weights is not None
        assert weights is not None
        self._weights.copy_(weights)
        self._weights_at = self.share.updates


def _saturate(wide: Tensor, out: Tensor, reach: float) -> None:
    """Write ``wide`` (float32) to ``out``; clamp values within ``reach`` times its range."""
    largest = torch.finfo(out.dtype).max
    near = wide.abs() <= reach * largest
    out.copy_(torch.where(near, wide.clamp(-largest, largest), wide))
