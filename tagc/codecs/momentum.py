"""The feedback kind ``momentum``: what travels is a moving average of the gradient.

With ``g`` a rank's gradient, ``e`` its residual, ``C`` the codec and ``G`` the owner's average:

    e <- (1 - rate) * e + rate * g        every rank, before the codec
    send C(e), e <- e - C(e)              the codec, as for the kind ``residual``
    G <- (1 - rate) * G + sum of C(e)     the owner, who hands out G

So ``G`` plus the sum of the residuals is the moving average of the sum of the gradients: what has
not been sent yet decays like everything else, and no old gradient arrives late at full size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tagc.codec_plans import FeedbackPlan
from tagc.plan import Segment


def new_average(segment: Segment, device: torch.device) -> Tensor | None:
    """``G`` of a segment, ``[columns]`` float32; None where its feedback keeps none."""
    feedback = segment.codec.feedback
    if feedback is None or not feedback.rate:
        return None
    return torch.zeros(segment.columns, device=device)


def scale(feedback: FeedbackPlan | None) -> float:
    """What the first gradient is multiplied by before it is selected from."""
    return feedback.rate if feedback is not None and feedback.rate else 1.0


def dtype_of(gradient: torch.dtype, feedback: FeedbackPlan | None) -> torch.dtype:
    """Of what :func:`fresh` gives the codec."""
    return gradient if feedback is None or not feedback.rate else torch.float32


def fresh(grad: Tensor, residual: Tensor | None, feedback: FeedbackPlan | None) -> Tensor:
    """What the codec must add to the residual, both ``[D, columns]``: the gradient, or
    ``rate * grad`` in float32, and then the residual decays in place."""
    if feedback is None or not feedback.rate:
        return grad
    assert residual is not None
    residual.mul_(1 - feedback.rate)
    return grad.float() * feedback.rate


def received(out: Tensor, average: Tensor | None) -> Tensor:
    """Where the codec should decode to, for :func:`hand_out`: at full precision."""
    return out if average is None or out.dtype == average.dtype else torch.empty_like(average)


def hand_out(
    sent: Tensor, average: Tensor | None, feedback: FeedbackPlan | None, out: Tensor
) -> None:
    """Write the moving average to ``out``; NaN where ``sent`` is, which counts as 0.

    Args:
        sent: ``[columns]``, what :func:`received` gave, decoded.
        average: ``G``, updated in place; None where there is nothing to do.
        out: ``[columns]``.
    """
    if average is None:
        return
    assert feedback is not None
    lost = sent.isnan()
    average.mul_(1 - feedback.rate).add_(sent.float().nan_to_num(nan=0.0))
    out.copy_(average)
    out.masked_fill_(lost, float("nan"))


def warm_up(average: Tensor | None, feedback: FeedbackPlan | None, out: Tensor) -> None:
    """The same after a dense reduction, whose sum is in ``out`` ``[columns]``."""
    if average is not None and feedback is not None:
        hand_out(out.float() * feedback.rate, average, feedback, out)


class Part(Protocol):
    """A segment in one of the codecs."""

    @property
    def momentum(self) -> Tensor | None: ...


def state(parts: Sequence[Part]) -> dict[str, Tensor]:
    """The averages, for :meth:`tagc.codecs.Columns.state`."""
    return {f"momentum.{i}": p.momentum for i, p in enumerate(parts) if p.momentum is not None}


def load_state(parts: Sequence[Part], saved: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`state`."""
    for name, average in state(parts).items():
        average.copy_(saved[name])
