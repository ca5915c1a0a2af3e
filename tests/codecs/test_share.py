"""A lead that is measured: the share of what is owed that messages carry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.launching import launch
from tagc.ops.launches import UndoLag
from tagc.ops.sampling import SAMPLE, LearnShare, SampleOwed, share_stride, weights_of

DECAY = 0.9


class Segment:
    """One segment, whose codec sends all but a share of what is owed."""

    def __init__(self, columns: int, rows: int = 1) -> None:
        self.residual, self.sent = torch.zeros(rows, columns), torch.zeros(1, columns)
        self.sums, self.weights = torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, 1.0])
        self.step = torch.zeros((), dtype=torch.int64)
        self.stride = share_stride(rows, columns)
        self.owed = torch.empty(rows, columns // self.stride, dtype=torch.float64)

    def encode(self, gradient: Tensor, left: Tensor | float) -> Tensor:
        """Send what is owed, of which ``left`` remains: a tensor, or a share."""
        launch(SampleOwed(self.stride), gradient, self.residual, self.step, self.owed)
        owed = gradient + self.residual
        self.residual.copy_(left if isinstance(left, Tensor) else owed * left)
        places = (self.residual, self.owed, self.step, self.sums, self.weights)
        launch(LearnShare(self.stride), *places)
        self.step += 1
        return owed - self.residual

    def correct(self, decoded: Tensor) -> Tensor:
        out = torch.empty_like(decoded)
        launch(UndoLag(), decoded.clone(), self.sent, out, self.weights)
        return out

    @property
    def share(self) -> float:
        return self.weights[1].item()


@pytest.mark.parametrize("carried", [0.125, 0.5, 1.0])
def test_a_codec_that_sends_a_share_hands_out_the_gradient_itself(carried: float) -> None:
    """From the first step on: then the share is known, and nothing was late before."""
    generator = torch.Generator().manual_seed(0)
    segment = Segment(1000)
    for _ in range(20):
        gradient = torch.randn(1, 1000, generator=generator)
        out = segment.correct(segment.encode(gradient, 1 - carried))
        # Powers of two: the share is exact, so what rounds are the residual's few operations, on
        # numbers of up to 1 / carried times the gradient's size, and a division by the share.
        limit = 16 * 2**-24 / carried**2 * 5
        torch.testing.assert_close(out, gradient, rtol=0, atol=limit)


def test_it_is_the_slope_of_a_regression() -> None:
    """Of signs, level times the root of 2 / pi for a Gaussian; of a sample, and of all rows."""
    generator = torch.Generator().manual_seed(1)
    segment = Segment(20_000, rows=3)
    for _ in range(30):
        segment.residual.zero_()
        owed = torch.randn(3, 20_000, generator=generator)
        segment.encode(owed, owed - 0.8 * owed.sign())
    exact = 0.8 * math.sqrt(2 / math.pi)
    # |x| has the variance 1 - 2 / pi, and x * x 2; a moving average counts (1 + b) / (1 - b) steps.
    seen = SAMPLE * (1 + DECAY) / (1 - DECAY) / 2
    error = 0.8 * math.sqrt(1 - 2 / math.pi + exact**2 * 2) / math.sqrt(seen)
    assert abs(segment.share - exact) < 5 * error


def test_what_is_not_finite_leaves_no_trace() -> None:
    segment, ones = Segment(10), torch.ones(1, 10)
    segment.encode(ones, 0.5)
    before = segment.share
    wrong = ones.clone()
    wrong[0, 3] = math.inf
    segment.encode(wrong, torch.zeros(1, 10))
    assert segment.share == before


def test_nothing_owed_and_nothing_sent() -> None:
    segment = Segment(4)
    segment.encode(torch.zeros(1, 4), 0.5)
    assert segment.share == 1
    # A message that carries next to nothing is not blown up without a limit.
    segment.encode(torch.ones(1, 4), 1.0)
    out = segment.correct(torch.ones(1, 4))
    torch.testing.assert_close(out, torch.full((1, 4), 10.0), rtol=1e-6, atol=0)


def test_a_loss_scale_changes_nothing() -> None:
    segment = Segment(4)
    segment.encode(torch.ones(1, 4), 0.25)
    segment.sums *= 1024.0**2
    assert weights_of(segment.sums)[1] == 0.75
    segment.residual.zero_()
    segment.encode(torch.full((1, 4), 1024.0), 0.25)
    assert segment.share == 0.75
