"""Dynamic sparsification: a threshold per segment and destination that follows the density.

Every rank selects with the same threshold. Each step the ranks' counts are summed by an
all-reduce that nobody waits for, and the next step on, all ranks move the threshold alike. Only
multiplication, division, comparison and square roots are used, which IEEE 754 rounds the same way
everywhere, so thresholds stay equal to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.ops import ABOVE, KEPT, NONZERO
from tagc.quantize import MAX_THRESHOLD, MIN_THRESHOLD

_SAMPLE = 8192
# A threshold below the smallest element would run off to zero: aim to leave a tenth of the
# non-zero groups below it when there are fewer of those than the target.
_NONZERO_SHARE = 0.9
_MAX_RATIO = 256.0
_NOTHING_ABOVE = 1 / 16
_BIAS_RATE, _MAX_BIAS = 0.1, 4.0


def sampled_threshold(grad: Tensor, lanes: int, density: float) -> Tensor:
    """Quantile of the group maxima in a strided sample, one per destination.

    Args:
        grad: ``[W, n]``.
        lanes: elements per group.
        density: fraction of groups to be above.

    Returns:
        ``[W]`` float32; the sample's maximum where the quantile is zero, 0 where all is zero.
    """
    groups = grad.shape[1] // lanes
    if groups == 0:
        return grad.abs().amax(1).float().nan_to_num(0.0, 0.0)
    stride = max(1, groups // _SAMPLE)
    whole = grad[:, : groups * lanes].unflatten(1, (groups, lanes))
    size = whole[:, ::stride].float().nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)
    size = size.sort(dim=1, descending=True).values
    wanted = min(size.shape[1] - 1, round(density * size.shape[1]))
    return torch.where(size[:, wanted] > 0, size[:, wanted], size[:, 0])


def agree(sampled: Tensor) -> Tensor:
    """First thresholds from every rank's sample, the same on every rank.

    Args:
        sampled: ``[R, ...]`` float32, gathered from the ranks in rank order.

    Returns:
        ``[...]`` float32: the mean over ranks that saw something, 1 where none did.
    """
    total, seen = torch.zeros_like(sampled[0]), torch.zeros_like(sampled[0])
    for row in sampled:
        total = total + row
        seen = seen + (row > 0)
    mean = total / seen.clamp(min=1)
    return torch.where(seen > 0, mean, 1.0).clamp(MIN_THRESHOLD, MAX_THRESHOLD)


def steer(threshold: Tensor, bias: Tensor, counts: Tensor, target: Tensor) -> None:
    """Move thresholds towards the target, in place.

    The number of groups above a threshold falls roughly with its square or cube, so the fourth
    root of the ratio closes half of the gap or more in a step, without overshoot.

    Gradients vary in size from step to step, and what exceeds the capacity in a large one does
    not make up for what a small one lacks. ``bias`` learns slowly how many groups to aim for so
    that the number *kept* is on target in the mean.

    Args:
        threshold: ``[segments, W]`` float32.
        bias: ``[segments, W]`` float32, 1 at first.
        counts: ``[segments, W, 3]`` int32, summed over ranks, of the previous step.
        target: ``[segments, 1]`` float32, groups that all ranks together should keep.
    """
    above, nonzero, kept = (counts[..., i].float() for i in (ABOVE, NONZERO, KEPT))
    goal = torch.minimum(target, nonzero * _NONZERO_SHARE).clamp(min=0.5)
    bias.mul_(1 + _BIAS_RATE * (goal - kept) / goal).clamp_(1.0, _MAX_BIAS)
    ratio = (above / (goal * bias)).clamp(1 / _MAX_RATIO, _MAX_RATIO)
    factor = torch.where(above > 0, ratio.sqrt().sqrt(), _NOTHING_ABOVE)
    factor = torch.where(nonzero > 0, factor, 1.0)
    threshold.mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)
