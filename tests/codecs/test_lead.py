"""A lead, given or measured: the owner of a shard undoes the lag of error feedback.

A reducer without a lead sends the same messages, and hands out what was sent: the other's formula
is over that.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.launching import launch
from support.units import matrix_plan, normal, reduce, unit_reducer
from tagc.collect import UnitReducer
from tagc.ops.launches import UndoLag
from tagc.ops.sampling import SAMPLE, LearnShare, SampleOwed, share_stride
from tagc.plan import UnitPlan

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


@pytest.mark.parametrize("carried", [0.125, 1.0])
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


EXACT: Any = {"rtol": 0, "atol": 0}
CODECS: dict[str, dict[str, Any]] = {
    "matrix 1 bit": {"kind": "matrix", "level": 1.3},
    "sketch": {"kind": "sketch", "density": 0.1, "symbol": "int8x4"},
}


def leading(lead: float, **more: Any) -> dict[str, Any]:
    return {"kind": "residual", "lead": lead, **more}


def spans(plan: UnitPlan) -> list[slice]:
    return [slice(s.start, s.stop) for s in plan.compressed]


def last_sums(reducer: UnitReducer) -> list[Tensor]:
    """`Q` of every segment, `[columns]`."""
    return [q[0] for q in reducer.owner_states.values()]


@on_ranks(2)
@pytest.mark.parametrize(("codec", "op"), [("matrix 1 bit", "AVG"), ("sketch", "SUM")])
def test_what_is_handed_out_is_the_formula(rank: int, world_size: int, codec: str, op: str) -> None:
    """Operation by operation, in float32; nothing of it changes what is sent or owed."""
    lead = 0.3
    plan = matrix_plan(world_size, CODECS[codec], leading(lead))
    ahead = unit_reducer(plan)
    plain = unit_reducer(matrix_plan(world_size, CODECS[codec], {"kind": "residual"}))
    before = [torch.zeros(s.columns) for s in plan.compressed]
    for step in range(5):
        buffer = normal(world_size, plan.columns, step)[rank]
        out, sent = (reduce(each, buffer, getattr(dist.ReduceOp, op)) for each in (ahead, plain))
        for i, span in enumerate(spans(plan)):
            expected = (sent[span] - (1 - lead) * before[i]) / lead
            torch.testing.assert_close(out[span], expected, **EXACT)
            torch.testing.assert_close(last_sums(ahead)[i], sent[span], **EXACT)
            before[i] = sent[span].clone()
        for segment in plan.dense:
            span = slice(segment.start, segment.stop)
            torch.testing.assert_close(out[span], sent[span], **EXACT)
        for one, other in zip(ahead.residuals.values(), plain.residuals.values(), strict=True):
            torch.testing.assert_close(one, other, **EXACT)
    assert all(q.any() for q in last_sums(ahead))
    assert not plain.owner_states


@on_ranks(2)
@pytest.mark.parametrize("codec", ["matrix 1 bit", "sketch"])
def test_a_warm_up_leaves_no_lag(rank: int, world_size: int, codec: str) -> None:
    plan = matrix_plan(world_size, CODECS[codec] | {"warmup_steps": 2}, leading(0.5))
    reducer = unit_reducer(plan)
    for step in range(3):
        buffers = normal(world_size, plan.columns, step)
        out = reduce(reducer, buffers[rank])
        if step < plan.warmup_steps:
            torch.testing.assert_close(out, buffers[:, rank].sum(0) / 2, **EXACT)
            assert not any(q.any() for q in last_sums(reducer))
            assert not any(e.any() for e in reducer.residuals.values())
        else:
            for i, span in enumerate(spans(plan)):
                torch.testing.assert_close(out[span], last_sums(reducer)[i] / 0.5, **EXACT)
                assert out[span].any()
