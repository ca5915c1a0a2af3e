"""Dynamic sparsification: a threshold per segment and destination that follows the density.

Every rank selects with the same threshold. Each step the ranks' counts are summed by an
all-reduce that nobody waits for, and the next step on, all ranks move the threshold alike. Only
the four basic operations and comparisons are used, which IEEE 754 rounds the same way
everywhere, so thresholds stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tagc.codecs.selection.quantization_step import MAX_THRESHOLD, MIN_THRESHOLD
from tagc.ops import ABOVE, KEPT, NONZERO, SATURATED

_SAMPLE = 8192
# A threshold below the smallest element would run off to zero: aim to leave a tenth of the
# non-zero groups below it when there are fewer of those than the target.
_NONZERO_SHARE = 0.9
_MAX_RATIO = 256.0
_FIRST_EXPONENT, _MIN_EXPONENT, _MAX_EXPONENT = 1 / 4, 1 / 32, 1 / 2
_NOTHING_ABOVE = 1 / 16
# The bias learns only while the threshold is about right: elsewhere it would wind up.
_BIAS_RATE, _MAX_BIAS, _NEAR = 0.3, 4.0, 4.0


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
        return grad.float().nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
    stride = max(1, groups // _SAMPLE)
    whole = grad[:, : groups * lanes].unflatten(1, (groups, lanes))
    size = whole[:, ::stride].float().nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)
    size = size.sort(dim=1, descending=True).values
    wanted = min(size.shape[1] - 1, round(density * size.shape[1]))
    return torch.where(size[:, wanted] > 0, size[:, wanted], size[:, 0])


def mean_threshold(sampled: Tensor) -> Tensor:
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


class ThresholdController:
    """Thresholds of a unit's segments and what is needed to keep them on target.

    How steeply the count falls with the threshold differs widely: like its square for raw
    gradients, like its tenth power for a residual that piled up just below. So the exponent of
    the correction is learnt: it grows while the count stays on one side of the target and halves
    when it overshoots (as in Rprop).

    Gradients also vary in size from step to step, and what exceeds the capacity in a large one
    does not make up for what a small one lacks. ``bias`` learns slowly how many groups to aim for
    so that the number *kept* is on target in the mean.

    Where a distribution's tail is heavy (embedding, head), elements saturate however common the
    threshold is; ``boost`` doubles the quantization step while more than one kept group in 64
    clips, and gives it back when none in 1024 does.

    Attributes:
        threshold: ``[segments, W]`` float32.
        boost: ``[segments, W]`` float32 power of two, 1 or more: factor on the quantization step.
    """

    def __init__(self, target: Tensor, max_boost: Tensor, world_size: int) -> None:
        """New state.

        Args:
            target: ``[segments]`` float32, groups that all ranks together should keep.
            max_boost: ``[segments]`` float32 powers of two.
        """
        shape = (target.shape[0], world_size)
        self.threshold = target.new_ones(shape)
        self.boost = target.new_ones(shape)
        self._target, self._max_boost = target[:, None], max_boost[:, None]
        self._bias = target.new_ones(shape)
        self._exponent = target.new_full(shape, _FIRST_EXPONENT)
        self._side = target.new_zeros(shape)

    def state(self) -> dict[str, Tensor]:
        """All that the next update depends on."""
        return {
            "threshold": self.threshold,
            "boost": self.boost,
            "bias": self._bias,
            "exponent": self._exponent,
            "side": self._side,
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for what no update could have left."""
        for name, least, most in (
            ("threshold", MIN_THRESHOLD, MAX_THRESHOLD),
            ("boost", 1.0, float(self._max_boost.max())),
            ("bias", 1.0, _MAX_BIAS),
            ("exponent", _MIN_EXPONENT, _MAX_EXPONENT),
            ("side", -1.0, 1.0),
        ):
            if not bool(((state[name] >= least) & (state[name] <= most)).all()):
                raise ValueError(f"{name} is not between {least:g} and {most:g}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def rescale(self, factor: float | Tensor) -> None:
        """Follow gradients that are ``factor`` times as large from now on."""
        self.threshold.mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)

    def update(self, counts: Tensor) -> None:
        """Move the thresholds towards the target.

        Args:
            counts: ``[segments, W, 4]`` int32, summed over ranks, of the previous step.
        """
        above, nonzero, kept = (counts[..., i].float() for i in (ABOVE, NONZERO, KEPT))
        saturated = counts[..., SATURATED].float()
        coarser, finer = saturated * 64 > kept, saturated * 1024 < kept
        self.boost.mul_(torch.where(coarser, 2.0, torch.where(finer, 0.5, 1.0)))
        self.boost.copy_(self.boost.clamp(min=1.0).minimum(self._max_boost))
        goal = torch.minimum(self._target, nonzero * _NONZERO_SHARE).clamp(min=0.5)
        ratio = (above / (goal * self._bias)).clamp(max=_MAX_RATIO)
        near = (ratio > 1 / _NEAR) & (ratio < _NEAR)
        learn = torch.where(near, _BIAS_RATE * (goal - kept) / goal, 0.0)
        self._bias.mul_(1 + learn).clamp_(1.0, _MAX_BIAS)

        side = (ratio - 1).sign()
        swung = side * self._side < 0
        self._exponent.mul_(torch.where(swung, 0.5, 1.25)).clamp_(_MIN_EXPONENT, _MAX_EXPONENT)
        self._side.copy_(side)
        # ratio ** p to first order around 1, bounded by (1 + p) / (1 - p), and free of functions
        # that another libm rounds differently.
        p = self._exponent
        factor = ((1 - p) + (1 + p) * ratio) / ((1 + p) + (1 - p) * ratio)
        factor = torch.where(above > 0, factor, _NOTHING_ABOVE)
        factor = torch.where(nonzero > 0, factor, 1.0)
        self.threshold.mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)
