"""Steers a threshold per segment and destination, so that the kept groups follow the density.

Every rank selects with the same threshold. An all-reduce sums the ranks' counts in each step; in
the next step, all ranks move the threshold by these sums in the same way
(:func:`tagc.ops.reference.steer`).

The count falls with the threshold at very different rates: like its square for raw gradients, like
its tenth power for a residual that piled up just below. So the exponent of the correction is
learnt: it grows while the count stays on one side of the target, and halves when the count
overshoots (as in Rprop).

Gradients also vary in size between steps, and groups beyond the capacity in a large step do not
make up for those missing in a small one. A bias slowly learns how many groups to aim for, so that
the mean number of *kept* groups is on target.

If a distribution has a heavy tail (embedding, head), elements saturate at any threshold. ``boost``
doubles the quantization step while more than one kept group in 64 clips, and undoes that when fewer
than one in 1024 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.ops import COUNTS, Ops
from tagc.ops.program import Launch, Operator, Place
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
    STEP,
    THRESHOLD,
    step_of,
)
from tagc.ops.thresholds import (
    STATES as ROWS,
)
from tagc.ops.torch_operators import Fill, Set

_SAMPLE = 8192


STATES = {"threshold": THRESHOLD, "boost": BOOST, "bias": BIAS, "exponent": EXPONENT, "side": SIDE}
"""The parts of the state that the next update depends on, by name in checkpoints."""


@dataclass(frozen=True)
class Steer(Operator):
    """``(counts [segments, D, 4], goals [4, segments], state)``. See
    :func:`tagc.ops.reference.steer`.

    Attributes:
        fixes: whether any segment has no bias but 1.
    """

    fixes: bool = False

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        def steer(counts: Tensor, goals: Tensor, state: Tensor) -> None:
            ops.steer(counts, goals[0], goals[1], goals[2], state)
            if self.fixes:  # it would grow without end
                state[BIAS].masked_fill_(goals[3, :, None] == 0, 1.0)

        return steer


class Thresholds:
    """A threshold for each segment and destination, with all that steers it.

    Attributes:
        state: see :func:`tagc.ops.reference.steer`.
        counts: those of the last step, by segment and destination.
    """

    def __init__(
        self,
        name: str,
        counts: str,
        rows: int,
        target: Sequence[float],
        *,
        max_boost: Sequence[float] = (),
        scale: Sequence[float] = (),
        learns: Sequence[bool] = (),
    ) -> None:
        """Name the tensors.

        Args:
            name, counts: names of the state and of the counts in checkpoints.
            rows: destinations ``D``.
            target: by segment, how many groups to keep per destination; for a sketch, of all ranks
                together.
            max_boost: by segment, the largest boosts, powers of two; none for 1.
            scale: by segment, see :func:`tagc.codecs.sketch.plan.step_scale`; none if nothing is
                quantized.
            learns: by segment, whether the threshold decides which groups are kept, so that a bias
                is learnt from their number; none if it does everywhere.
        """
        n = len(target)
        self.state = Place(f"sketch.{name}", (ROWS, n, rows), torch.float32, "state")
        self.counts = Place(f"sketch.{counts}", (n, rows, COUNTS), torch.int32, "state")
        self._goals = Place(f"sketch.{name}.goals", (4, n), torch.float32, "kept")
        each = (target, max_boost or [1.0] * n, scale or [0.0] * n, learns or [True] * n)
        self._values = tuple(float(x) for row in each for x in row)
        self._steer = Steer(not all(learns))

    def start(self) -> Iterator[Launch]:
        """The first values, and the goals."""
        yield Launch(Set(self._values), (self._goals,))
        yield Launch(Fill(1.0), (self.state,))
        yield Launch(Fill(FIRST_EXPONENT), (self.state.row(EXPONENT),))
        yield Launch(Fill(0.0), (self.state.row(SIDE),))

    def steer(self) -> Launch:
        return Launch(self._steer, (self.counts, self._goals, self.state))


@dataclass(frozen=True)
class SampleThreshold(Operator):
    """``(x [D, n], threshold [1, D] float32)``: the quantile of the group maxima in a strided
    sample; the sample's maximum if the quantile is zero, 0 if everything is zero.

    Attributes:
        lanes: elements per group.
        density: the fraction of groups that should be above the threshold.
    """

    lanes: int
    density: float

    def run(self, x: Tensor, threshold: Tensor) -> None:
        groups = max(1, x.shape[1] // self.lanes)
        whole = x[:, : groups * self.lanes].unflatten(1, (groups, -1))
        some = whole[:, :: max(1, groups // _SAMPLE)].float().nan_to_num(0.0, 0.0, 0.0)
        size = some.abs().amax(-1).sort(dim=1, descending=True).values
        wanted = min(size.shape[1] - 1, round(self.density * size.shape[1]))
        threshold.copy_(torch.where(size[:, wanted] > 0, size[:, wanted], size[:, 0]))


@dataclass(frozen=True)
class ThresholdStart(Operator):
    """``(sampled [W, segments * D] float32, state)``: starts from the mean over all ranks whose
    sample is not zero, and from 1 if all are."""

    scale: tuple[float, ...]

    def run(self, sampled: Tensor, state: Tensor) -> None:
        sampled = sampled.view(-1, *state.shape[1:])
        total, seen = torch.zeros_like(sampled[0]), torch.zeros_like(sampled[0])
        for row in sampled:  # in rank order, so that all ranks get the same
            total = total + row
            seen = seen + (row > 0)
        mean = torch.where(seen > 0, total / seen.clamp(min=1), 1.0)
        _start(state, mean, self.scale)


@dataclass(frozen=True)
class ChoiceStart(Operator):
    """``(state, choice)``: the thresholds of ``choice`` start as those of the segments ``of``."""

    of: tuple[int, ...]

    def run(self, state: Tensor, choice: Tensor) -> None:
        for i, segment in enumerate(self.of):
            _start(choice[:, i : i + 1], state[THRESHOLD, segment], (0.0,))


def _start(state: Tensor, threshold: Tensor, scale: tuple[float, ...]) -> None:
    state[THRESHOLD].copy_(threshold).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)
    for i, factor in enumerate(scale):
        step = step_of(state[THRESHOLD, i], torch.full_like(state[THRESHOLD, i], factor))
        torch.mul(step, state[BOOST, i], out=state[STEP, i])


def rescale(state: Tensor, factor: float | Tensor) -> None:
    """Scale the thresholds for gradients that become ``factor`` times as large."""
    state[THRESHOLD].mul_(factor).clamp_(MIN_THRESHOLD, MAX_THRESHOLD)


def check_controller(state: Mapping[str, Tensor], *, max_boost: float) -> None:
    """Raise ValueError for values that no update leaves."""
    for name, least, most in (
        ("threshold", MIN_THRESHOLD, MAX_THRESHOLD),
        ("boost", 1.0, max_boost),
        ("bias", 1.0, MAX_BIAS),
        ("exponent", MIN_EXPONENT, MAX_EXPONENT),
        ("side", -1.0, 1.0),
    ):
        if not bool(((state[name] >= least) & (state[name] <= most)).all()):
            raise ValueError(f"{name} is not between {least:g} and {most:g}")
