"""Steers a threshold per segment and destination, so that the kept groups follow the density.

Every rank selects with the same threshold. An all-reduce sums the ranks' counts in each step; in
the next step, all ranks move the threshold by these sums in the same way
(:meth:`tagc.ops.thresholds.ThresholdOps.steer`). The owner of a shard, who alone chooses a shared
support, steers by its own counts.
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
        density: the fraction of groups that should be above the threshold.

    Returns:
        ``[W]`` float32; the sample's maximum if the quantile is zero, 0 if everything is zero.
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
        ``[...]`` float32: the mean over ranks whose sample is not zero; 1 if all are.
    """
    total, seen = torch.zeros_like(sampled[0]), torch.zeros_like(sampled[0])
    for row in sampled:
        total = total + row
        seen = seen + (row > 0)
    mean = total / seen.clamp(min=1)
    return torch.where(seen > 0, mean, 1.0).clamp(MIN_THRESHOLD, MAX_THRESHOLD)


def check_counts(counts: Tensor) -> None:
    """Raise ValueError for negative counts."""
    if bool((counts < 0).any()):
        raise ValueError("a count of selected groups is negative")


class ThresholdController:
    """The thresholds of a unit's segments, and the state of their control.

    The count falls with the threshold at very different rates: like its square for raw gradients,
    like its tenth power for a residual that piled up just below. So the controller learns the
    exponent of its correction: it grows while the count stays on one side of the target, and halves
    when the count overshoots (as in Rprop).

    Gradients also vary in size between steps, and groups beyond the capacity in a large step do not
    make up for those missing in a small one. A bias slowly learns how many groups to aim for, so
    that the mean number of *kept* groups is on target.

    If a distribution has a heavy tail (embedding, head), elements saturate at any threshold.
    ``boost`` doubles the quantization step while more than one kept group in 64 clips, and undoes
    that when fewer than one in 1024 does.

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
        learns: Sequence[bool] | None = None,
    ) -> None:
        """Start with neutral state.

        Args:
            target: by segment, how many groups to keep per destination; for a sketch, of all ranks
                together.
            max_boost: by segment, the largest boosts, powers of two; default: 1.
            scale: by segment, see :func:`tagc.codecs.selection.quantization_step.step_scale`;
                default: nothing is quantized.
            learns: by segment, whether the threshold decides which groups are kept, so that a bias
                is learnt from their number; default: all.
        """

        def numbers(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._ops, n = ops, len(target)
        self._target = numbers(target)
        self._max_boost = numbers([1.0] * n if max_boost is None else max_boost)
        self._scale = numbers([0.0] * n if scale is None else scale)
        learns = [True] * n if learns is None else learns
        # No bias but 1 if kept groups do not follow the threshold: it would grow without end.
        self._fixed = (
            None
            if all(learns)
            else ~torch.tensor([*learns], dtype=torch.bool, device=device)[:, None]
        )
        self._state = torch.ones(STATES, n, destinations, dtype=torch.float32, device=device)
        self._state[EXPONENT] = FIRST_EXPONENT
        self._state[SIDE] = 0.0
        self.threshold, self.boost = self._state[THRESHOLD], self._state[BOOST]
        self.quantization_step = self._state[STEP]
        ops.prepare_thresholds()

    def start(self, threshold: Tensor) -> None:
        """Start from ``threshold`` ``[segments, D]``, clamped to the bounds of thresholds."""
        self.threshold.copy_(threshold).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)
        step = step_of(self.threshold, self._scale[:, None])
        self.quantization_step.copy_(step * self.boost)

    def state(self) -> dict[str, Tensor]:
        """The state that the next update depends on."""
        return {
            "threshold": self.threshold,
            "boost": self.boost,
            "bias": self._state[BIAS],
            "exponent": self._state[EXPONENT],
            "side": self._state[SIDE],
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that no update leaves."""
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
        """Continue from a :meth:`state`; the next update computes the quantization steps."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def rescale(self, factor: float | Tensor) -> None:
        """Scale the thresholds for gradients that become ``factor`` times as large."""
        self.threshold.mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)

    def update(self, counts: Tensor) -> None:
        """Move the thresholds towards the target, and the quantization steps with them.

        Args:
            counts: the previous step's counts, ``[segments, D, 4]`` int32; for a sketch summed
                over ranks.
        """
        self._ops.steer(counts, self._target, self._max_boost, self._scale, self._state)
        if self._fixed is not None:
            self._state[BIAS].masked_fill_(self._fixed, 1.0)
