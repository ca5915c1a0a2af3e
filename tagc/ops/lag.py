"""Undoes the lag of error feedback: the owner's last step with a lead.

Messages carry only a share of gradient plus residual, so the codec's sum is a moving average of
gradients (see :mod:`tagc.codecs.feedback`). The owner inverts it with the last step's sum.
"""

from __future__ import annotations

import torch
from torch import Tensor


def undo_lag(decoded: Tensor, sent: Tensor, out: Tensor, *, lead: float) -> None:
    """Invert a moving average: ``out = (decoded - (1 - lead) * sent) / lead``. ``decoded`` is
    copied to ``sent``.

    ``lead`` and ``1 - lead`` are rounded to float32, and so are a product, a difference and a
    quotient, each by itself (no fused multiply-add; IEEE division). The quotient is rounded to
    ``out``'s dtype. Where ``decoded`` is not finite, ``out`` is NaN, and ``sent`` becomes 0.

    Args:
        decoded: ``[n]`` float32, the sum (or average) over ranks; may be ``out``.
        sent: ``[n]`` float32, ``decoded`` of the last step, updated in place.
        out: ``[n]`` float32, bfloat16 or float16, written: the optimizer's gradient.
        lead: the share of gradient plus residual that messages carry.
    """
    # On the device: torch divides by a number of the host with its inverse there.
    late, share = torch.tensor([1 - lead, lead], dtype=torch.float32, device=decoded.device)
    lost = ~decoded.isfinite()
    found = decoded.masked_fill(lost, 0.0)
    ahead = sent * late
    torch.sub(found, ahead, out=ahead).div_(share)
    sent.copy_(found)
    out.copy_(ahead.masked_fill_(lost, torch.nan))
