"""Dynamic sparsification: a threshold per segment and destination that follows the density.

Every rank selects with the same threshold. Each step the ranks' counts are summed by an
all-reduce that nobody waits for, and the next step on, all ranks move the threshold alike
(:meth:`tagc.ops.thresholds.ThresholdOps.steer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tagc.ops import Ops
from tagc.ops.thresholds import (
    BIAS,
    BOOST,
    EXPONENT,
    FIRST_EXPONENT,
    MAX_BIAS,
    MAX_EXPONENT,
    MAX_THRESHOLD,
    MIN_EXPONENT,
    MIN_THRESHOLD,
    SIDE,
    STATES,
    STEP,
    THRESHOLD,
    step_of,
)

_SAMPLE = 8192


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


def check_counts(counts: Tensor) -> None:
    """Raise ValueError for counts that no selection makes."""
    if bool((counts < 0).any()):
        raise ValueError("a count of selected groups is negative")


class ThresholdController:
    """Thresholds of a unit's segments and what is needed to keep them on target.

    How steeply the count falls with the threshold differs widely: like its square for raw
    gradients, like its tenth power for a residual that piled up just below. So the exponent of
    the correction is learnt: it grows while the count stays on one side of the target and halves
    when it overshoots (as in Rprop).

    Gradients also vary in size from step to step, and what exceeds the capacity in a large one
    does not make up for what a small one lacks. A bias learns slowly how many groups to aim for
    so that the number *kept* is on target in the mean.

    Where a distribution's tail is heavy (embedding, head), elements saturate however common the
    threshold is; ``boost`` doubles the quantization step while more than one kept group in 64
    clips, and gives it back when none in 1024 does.

    Attributes:
        threshold: ``[segments, D]`` float32.
        boost: ``[segments, D]`` float32 power of two, 1 or more: factor on the quantization step.
        quantization_step: ``[segments, D]`` float32.
    """

    def __init__(
        self,
        target: Sequence[float],
        destinations: int,
        ops: Ops,
        device: torch.device,
        *,
        max_boost: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
    ) -> None:
        """New state.

        Args:
            target: by segment, groups that all ranks together should keep.
            max_boost: by segment, powers of two; default: 1.
            scale: by segment, see :func:`tagc.codecs.selection.quantization_step.step_scale`;
                default: nothing is quantized.
        """

        def numbers(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._ops, n = ops, len(target)
        self._target = numbers(target)
        self._max_boost = numbers([1.0] * n if max_boost is None else max_boost)
        self._scale = numbers([0.0] * n if scale is None else scale)
        self._state = torch.ones(STATES, n, destinations, dtype=torch.float32, device=device)
        self._state[EXPONENT] = FIRST_EXPONENT
        self._state[SIDE] = 0.0
        self.threshold, self.boost = self._state[THRESHOLD], self._state[BOOST]
        self.quantization_step = self._state[STEP]
        ops.prepare_thresholds()

    def start(self, threshold: Tensor) -> None:
        """Begin from these, ``[segments, D]``, within the bounds of all thresholds."""
        self.threshold.copy_(threshold).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)
        step = step_of(self.threshold, self._scale[:, None])
        self.quantization_step.copy_(step * self.boost)

    def state(self) -> dict[str, Tensor]:
        """All that the next update depends on."""
        return {
            "threshold": self.threshold,
            "boost": self.boost,
            "bias": self._state[BIAS],
            "exponent": self._state[EXPONENT],
            "side": self._state[SIDE],
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for what no update could have left."""
        for name, least, most in (
            ("threshold", MIN_THRESHOLD, MAX_THRESHOLD),
            ("boost", 1.0, float(self._max_boost.max())),
            ("bias", 1.0, MAX_BIAS),
            ("exponent", MIN_EXPONENT, MAX_EXPONENT),
            ("side", -1.0, 1.0),
        ):
            if not bool(((state[name] >= least) & (state[name] <= most)).all()):
                raise ValueError(f"{name} is not between {least:g} and {most:g}")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken: the next update makes the steps."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def rescale(self, factor: float | Tensor) -> None:
        """Follow gradients that are ``factor`` times as large from the next update on."""
        self.threshold.mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)

    def update(self, counts: Tensor) -> None:
        """Move the thresholds towards the target, and the steps with them.

        Args:
            counts: ``[segments, D, 4]`` int32, summed over ranks, of the previous step.
        """
        self._ops.steer(counts, self._target, self._max_boost, self._scale, self._state)
