"""What the owner of a shard hands out where that is not just the sum that it got.

With ``g`` a rank's gradient, ``e`` its residual and ``C`` the codec, there are two such kinds.

**Feedback ``momentum``**: what travels is a moving average of the gradient, and ``G`` is the
owner's part of it:

    e <- (1 - rate) * e + rate * g        every rank, before the codec
    send C(e), e <- e - C(e)              the codec, as for the kind ``residual``
    G <- (1 - rate) * G + sum of C(e)     the owner, who hands out G

So ``G`` plus the sum of the residuals is the moving average of the sum of the gradients: what has
not been sent yet decays like everything else, and no old gradient arrives late at full size.

**Feedback ``residual`` with a lead** ``K`` below 1. A codec whose messages carry the share ``K`` of
what is owed delivers ``K * g`` in the step, ``K * (1 - K) * g`` in the next, and so on: a moving
average, late by ``(1 - K) / K`` steps. That is little beside a momentum's ten, but it comes on top
of it: with momentum ``b`` an optimizer is stable up to a curvature of ``2 (1 + b) / (1 - b)`` over
the learning rate, 38 for 0.9, and with gradients a step late up to 1. So the owner inverts the
average, with ``Q`` the last sum it got:

    hand out (sum of C(x) - (1 - K) * Q) / K, Q <- sum of C(x)        Q is zero before the first

What was handed out so far then is what was sent, plus ``(1 - K) / K * Q``: the owner is ahead by
what the residuals of all ranks hold on average. Quantization noise grows by ``1 / K``, but only
where it changes from step to step, which a momentum averages out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codec_plans import FeedbackPlan
from tagc.plan import Segment


def new_kept(segment: Segment, device: torch.device) -> Tensor | None:
    """``G`` or ``Q`` of a segment, ``[columns]`` float32; None where its feedback keeps none."""
    feedback = segment.codec.feedback
    if feedback is None or not feedback.hands_out:
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


def received(out: Tensor, kept: Tensor | None) -> Tensor:
    """Where the codec should decode to, for :func:`hand_out`: at full precision."""
    return out if kept is None or out.dtype == kept.dtype else torch.empty_like(kept)


def hand_out(sent: Tensor, kept: Tensor | None, feedback: FeedbackPlan | None, out: Tensor) -> None:
    """Write what the optimizer gets to ``out``; NaN where ``sent`` is not finite, which is kept
    as 0.

    Args:
        sent: ``[columns]``, what :func:`received` gave, decoded.
        kept: ``G`` or ``Q``, updated in place; None where there is nothing to do.
        out: ``[columns]``.
    """
    if kept is None:
        return
    assert feedback is not None
    lost = ~sent.isfinite()
    got = sent.float().masked_fill(lost, 0.0)
    if feedback.rate:
        out.copy_(kept.mul_(1 - feedback.rate).add_(got))
    else:
        ahead = (got - kept * (1 - feedback.lead)).div_(feedback.lead)
        kept.copy_(got)
        out.copy_(ahead)
    out.masked_fill_(lost, float("nan"))


def warm_up(kept: Tensor | None, feedback: FeedbackPlan | None, out: Tensor) -> None:
    """After a dense reduction, whose sum is in ``out`` ``[columns]``: a moving average follows it.

    (The dense sum is late by nothing, so there is no lead to take over.)
    """
    if kept is not None and feedback is not None and feedback.rate:
        hand_out(out.float() * feedback.rate, kept, feedback, out)
