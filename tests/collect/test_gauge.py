"""The gauge finds how much larger gradients come out, though no rank has the dense one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.launching import launch
from support.units import codec_plan, reduce, unit_reducer
from support.units import normal as buffers
from tagc.collect import noise_factor
from tagc.ops.sampling import CompareNoise, SampleGradient, Spans, noise_samples


class Gauge:
    """Noise in spans of columns, as a replay measures it."""

    def __init__(self, spans: Spans) -> None:
        self.spans = spans
        self.own = torch.empty(noise_samples(spans), dtype=torch.float64)
        self.sums = torch.zeros(len(spans), 2, dtype=torch.float64)

    def measure(self, gradient: Tensor, out: Tensor, step: int, scale: float = 1.0) -> None:
        at = torch.tensor(step)
        launch(SampleGradient(self.spans), gradient[None], at, self.own)
        launch(CompareNoise(self.spans, scale), out[None], at, self.own, self.sums)


@on_ranks(2)
def test_sums_are_as_noisy_as_averages(rank: int, world_size: int) -> None:
    made, found = codec_plan(world_size, {"kind": "quantized"}), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        reducer = unit_reducer(made)
        reducer.measure_noise()
        for step in range(2):
            reduce(reducer, buffers(world_size, made.columns, step)[rank], op)
        assert reducer.gauge is not None
        found.append(reducer.gauge.sums)
    assert found[0].any()
    assert torch.equal(*found)


@on_ranks(2)
def test_noise_may_be_asked_for_later(rank: int, world_size: int) -> None:
    made = codec_plan(world_size, {"kind": "quantized"})
    reducer = unit_reducer(made)
    for step in range(4):
        if step == 2:
            reducer.measure_noise()
        reduce(reducer, buffers(world_size, made.columns, step)[rank])
    assert reducer.gauge is not None
    assert reducer.gauge.sums.any()


def test_what_is_not_finite_leaves_no_trace() -> None:
    spans = ((0, 900), (1000, 1300))
    gauge, ones = Gauge(spans), torch.ones(1400)
    gauge.measure(ones, 2 * ones, 0)
    before = gauge.sums.clone()
    wrong = ones.clone()
    wrong[slice(*spans[0])] = math.nan
    gauge.measure(ones, wrong, 1)
    torch.testing.assert_close(gauge.sums[0], before[0], rtol=0, atol=0)
    assert bool((gauge.sums[1] != before[1]).all())
    # Nor does a step without a gradient, whose share is 0 / 0.
    before = gauge.sums.clone()
    gauge.measure(0 * ones, 0 * ones, 2)
    torch.testing.assert_close(gauge.sums, before, rtol=0, atol=0)


def test_a_loud_step_counts_no_more_than_others() -> None:
    """Gradients fall by a large factor in the first steps of a training."""
    gauge, gradient = Gauge(((3, 8000),)), torch.randn(8000)
    for step, size in enumerate((1000.0, 1.0, 0.001)):
        # The first with noise of its own size four times over, in 3 parts out of 4 of its square.
        gauge.measure(size * gradient, size * gradient * (4 if step == 0 else 1), step)
    weights = [0.05 * 0.95**age for age in (2, 1, 0)]
    exact = (sum(weights) / (weights[0] / 4 + weights[1] + weights[2])) ** 0.5
    assert noise_factor(gauge.sums[0]) == pytest.approx(exact, rel=1e-5)


def test_factors_have_bounds() -> None:
    assert noise_factor(torch.tensor([0.0, 0.0])) == 1
    assert noise_factor(torch.tensor([4.0, 1.0])) == 2
    assert noise_factor(torch.tensor([4.0, -1.0])) == 32
    assert noise_factor(torch.tensor([1.0, 100.0])) == 0.5
