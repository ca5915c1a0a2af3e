"""The gauge finds how much larger gradients come out, though no rank has the dense one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.units import codec_plan, reduce, unit_reducer
from support.units import normal as buffers
from tagc.collect import NoiseGauge, noise_factor
from tagc.collect import gauge as gauges
from tagc.plan import UnitPlan

STEPS = 60


def plan(ranks: int) -> UnitPlan:
    return codec_plan(ranks, {"kind": "quantized", "bits": 4}, {"kind": "residual"})


def measured(ranks: int, noise: float, common: float, divisor: int, sample: int) -> list[float]:
    """Factors of a unit whose ranks have gradients of variance 1, and ``common`` between them, when
    noise of standard deviation ``noise`` is added to their average."""
    made = plan(ranks)
    generator = torch.Generator().manual_seed(ranks)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rank_gauges = [NoiseGauge(made, torch.device("cpu")) for _ in range(ranks)]
    for step in range(STEPS):
        # [rank, owner, S]
        grads = normal(ranks, ranks, made.columns) + common**0.5 * normal(1, ranks, made.columns)
        mean = grads.mean(0) + noise * normal(ranks, made.columns)
        for rank, gauge in enumerate(rank_gauges):
            gauge.look(grads[rank, rank], step)
            gauge.compare(mean[rank] * ranks / divisor, step, ranks / divisor)
    total = torch.stack([gauge.sums for gauge in rank_gauges]).sum(0)
    return [noise_factor(row) for row in total]


@pytest.mark.parametrize("sample", [4096, 64])
@pytest.mark.parametrize(("ranks", "divisor"), [(2, 2), (4, 4), (4, 1)])
@pytest.mark.parametrize(("noise", "common"), [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0)])
def test_factors_are_those_of_the_dense_gradient(
    ranks: int,
    divisor: int,
    noise: float,
    common: float,
    sample: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gauges, "SAMPLE", sample)
    dense = common + 1 / ranks
    exact = math.sqrt(1 + noise**2 / dense)
    # Steps that a moving average of decay b counts, (1 + b) / (1 - b), or all that there were.
    made = gauges.FIRST + (STEPS - gauges.FIRST) // gauges.EVERY
    seen = min(made, (1 + gauges.DECAY) / (1 - gauges.DECAY)) * ranks
    for factor, segment in zip(
        measured(ranks, noise, common, divisor, sample), plan(ranks).compressed, strict=True
    ):
        columns = segment.stop - segment.start
        taken = columns / math.ceil(columns / sample)
        # Of g * h, whose mean is `dense`: the variance is at most that of g times that of h, and
        # the mean squared again; of h * h it is less. A root halves relative errors.
        variance = (1 + common) * (dense + noise**2) + dense**2
        error = math.sqrt(variance / (taken * seen)) / dense
        assert abs(factor / exact - 1) < 5 * error


@on_ranks(2)
def test_sums_are_as_noisy_as_averages(rank: int, world_size: int) -> None:
    made, found = plan(world_size), []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        reducer = unit_reducer(made)
        reducer.measure_noise()
        for step in range(2):
            reduce(reducer, buffers(world_size, made.columns, step)[rank], op)
        assert reducer.gauge is not None
        found.append(reducer.gauge.sums)
    assert found[0].any()
    assert torch.equal(*found)


def test_other_elements_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element of no sample would be one that never counts."""
    monkeypatch.setattr(gauges, "SAMPLE", 16)
    made = plan(2)
    gauge = NoiseGauge(made, torch.device("cpu"))
    seen: set[float] = set()
    numbers = torch.arange(made.columns, dtype=torch.float32)
    for step in range(400):
        gauge._own = []
        gauge.look(numbers, step)
        for part in gauge._own:
            assert len(part) <= 16
            seen |= set(part.tolist())
    assert len(seen) == sum(s.stop - s.start for s in made.compressed)


def test_what_is_not_finite_leaves_no_trace() -> None:
    made = plan(2)
    gauge = NoiseGauge(made, torch.device("cpu"))
    ones = torch.ones(made.columns)
    gauge.look(ones, 0)
    gauge.compare(2 * ones, 0, 1.0)
    before = gauge.sums.clone()
    first = made.compressed[0]
    wrong = ones.clone()
    wrong[first.start : first.stop] = math.nan
    gauge.look(ones, 1)
    gauge.compare(wrong, 1, 1.0)
    torch.testing.assert_close(gauge.sums[0], before[0], rtol=0, atol=0)
    assert bool((gauge.sums[1] != before[1]).all())
    # Nor does a step without a gradient, whose share is 0 / 0.
    before = gauge.sums.clone()
    gauge.look(0 * ones, 2)
    gauge.compare(0 * ones, 2, 1.0)
    torch.testing.assert_close(gauge.sums, before, rtol=0, atol=0)


def test_a_loud_step_counts_no_more_than_others() -> None:
    """Gradients fall by a large factor in the first steps of a training."""
    made = plan(2)
    gauge = NoiseGauge(made, torch.device("cpu"))
    ones = torch.ones(made.columns)
    for step, size in enumerate((1000.0, 1.0, 0.001)):
        # The first with noise of its own size four times over, in 3 parts out of 4 of its square.
        gauge.look(size * ones, step)
        gauge.compare(size * ones * (4 if step == 0 else 1), step, 1.0)
    weights = [0.05 * 0.95**age for age in (2, 1, 0)]
    exact = (sum(weights) / (weights[0] / 4 + weights[1] + weights[2])) ** 0.5
    assert noise_factor(gauge.sums[0]) == pytest.approx(exact)


def test_factors_have_bounds() -> None:
    assert noise_factor(torch.tensor([0.0, 0.0])) == 1
    assert noise_factor(torch.tensor([4.0, 1.0])) == 2
    assert noise_factor(torch.tensor([4.0, -1.0])) == 32
    assert noise_factor(torch.tensor([1.0, 100.0])) == 0.5
