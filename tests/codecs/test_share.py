"""A lead that is measured: the share of what is owed that messages carry."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tagc.codecs.feedback import LeadFeedback, MeasuredShare, SegmentFeedback
from tagc.codecs.feedback import share as shares
from tagc.ops import get_ops

CPU = torch.device("cpu")


def feedback(columns: int, destinations: int = 1, lead: float | None = None) -> SegmentFeedback:
    rule = LeadFeedback(dtype=torch.float32, lead=lead)
    return SegmentFeedback(
        rule, destinations=destinations, columns=columns, ops=get_ops(CPU), device=CPU
    )


def encode(state: SegmentFeedback, gradient: Tensor, keep: Tensor | float) -> Tensor:
    """Send all but a share ``keep`` of what is owed."""
    with state.opened(gradient) as residual:
        assert residual is not None
        owed = gradient + residual
        residual.copy_(owed * keep)
        return owed - residual


@pytest.mark.parametrize("carried", [0.125, 0.5, 1.0])
def test_a_codec_that_sends_a_share_hands_out_the_gradient_itself(carried: float) -> None:
    """From the first step on: then the share is known, and nothing was late before."""
    generator = torch.Generator().manual_seed(0)
    state = feedback(1000)
    for _ in range(20):
        gradient = torch.randn(1, 1000, generator=generator)
        sent = encode(state, gradient, 1 - carried)
        out = torch.empty(1000)
        state.correct(sent[0].clone(), out)
        # Powers of two: the share is exact, so what rounds are the residual's few operations, on
        # numbers of up to 1 / carried times the gradient's size, and a division by the share.
        limit = 16 * 2**-24 / carried**2 * 5
        torch.testing.assert_close(out, gradient[0], rtol=0, atol=limit)


def test_it_is_the_slope_of_a_regression() -> None:
    """Of signs, level times the root of 2 / pi for a Gaussian; of a sample, and of all rows."""
    share = MeasuredShare(CPU)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        owed = torch.randn(3, 20_000, generator=generator)
        share.before(owed, torch.zeros_like(owed))
        share.after(owed - 0.8 * owed.sign())
    exact = 0.8 * math.sqrt(2 / math.pi)
    # |x| has the variance 1 - 2 / pi, and x * x 2; a moving average counts (1 + b) / (1 - b) steps.
    seen = shares.SAMPLE * (1 + shares.DECAY) / (1 - shares.DECAY) / 2
    error = 0.8 * math.sqrt(1 - 2 / math.pi + exact**2 * 2) / math.sqrt(seen)
    assert abs(share.value.item() - exact) < 5 * error


def test_other_elements_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SAMPLE", 8)
    share = MeasuredShare(CPU)
    rows = torch.arange(3 * 41, dtype=torch.float32).view(3, 41)
    seen: set[float] = set()
    for _ in range(600):
        share.before(rows, torch.zeros_like(rows))
        if share._owed is not None:
            assert 0 < len(share._owed) <= 9
            seen |= set(share._owed.tolist())
        share.after(rows)
    assert len(seen) == rows.numel()


def test_more_destinations_than_a_sample_has_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SAMPLE", 4)
    share = MeasuredShare(CPU)
    for _ in range(5):
        share.before(torch.ones(9, 2), torch.ones(9, 2))
        share.after(torch.ones(9, 2))
        assert share.value == 0.5


def test_what_is_not_finite_leaves_no_trace() -> None:
    state = feedback(10)
    ones = torch.ones(1, 10)
    encode(state, ones, 0.5)
    assert state.share is not None
    before = state.share.value.clone()
    wrong = ones.clone()
    wrong[0, 3] = math.inf
    with state.opened(wrong) as residual:
        assert residual is not None
        residual.zero_()
    torch.testing.assert_close(state.share.value, before, rtol=0, atol=0)


def test_nothing_owed_and_nothing_sent() -> None:
    state = feedback(4)
    assert state.share is not None
    assert state.share.value == 1
    encode(state, torch.zeros(1, 4), 0.5)
    assert state.share.value == 1
    # A message that carries next to nothing is not blown up without a limit.
    encode(state, torch.ones(1, 4), 1.0)
    out = torch.empty(4)
    state.correct(torch.ones(4), out)
    torch.testing.assert_close(out, torch.full((4,), 10.0), rtol=1e-6, atol=0)


def test_a_loss_scale_changes_nothing() -> None:
    share = MeasuredShare(CPU)
    share.before(torch.ones(1, 4), torch.zeros(1, 4))
    share.after(torch.full((1, 4), 0.25))
    share.rescale(1024.0)
    assert share.value == 0.75
    share.before(torch.full((1, 4), 1024.0), torch.zeros(1, 4))
    share.after(torch.full((1, 4), 256.0))
    assert share.value == 0.75
