"""Steering of thresholds: by formula, one by one; the CPU against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from support import oracle
from tagc.ops import cpu, reference
from tagc.ops.thresholds import BIAS, BOOST, EXPONENT, SIDE, STATES, STEP, THRESHOLD

both = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])


def first_state(segments: int, destinations: int, threshold: Tensor | float) -> Tensor:
    state = torch.ones(STATES, segments, destinations)
    state[THRESHOLD], state[SIDE] = threshold, 0
    return state


def one_by_one(counts, target, most, scale, state) -> list[np.float32]:
    """The formulas of the contract, in float32."""
    f = np.float32
    threshold, boost, bias, exponent, side, _ = (f(v) for v in state)
    above, nonzero, kept, saturated = (f(v) for v in counts)
    boost *= f(2) if saturated * f(64) > kept else f(0.5) if saturated * f(1024) < kept else f(1)
    boost = min(max(boost, f(1)), f(most))
    goal = max(min(f(target), f(0.9) * nonzero), f(0.5))
    ratio = min(above / (goal * bias), f(256))
    learnt = f(0.3) * (goal - kept) / goal if f(0.25) < ratio < f(4) else f(0)
    bias = min(max(bias * (f(1) + learnt), f(1)), f(4))
    now = np.sign(ratio - f(1))
    exponent *= f(0.5) if now * side < 0 else f(1.25)
    p = exponent = min(max(exponent, f(1 / 32)), f(0.5))
    factor = ((f(1) - p) + (f(1) + p) * ratio) / ((f(1) + p) + (f(1) - p) * ratio)
    factor = f(1) if nonzero == 0 else f(1 / 16) if above == 0 else factor
    threshold = min(max(threshold * factor, f(2.0**-96)), f(2.0**96))
    step = f(2.0 ** np.floor(np.log2(np.float64(threshold)))) * f(scale) if scale else f(1)
    return [threshold, boost, bias, exponent, now, step * boost]


def histories(rng: np.random.Generator, steps: int, segments: int, destinations: int) -> Tensor:
    """Counts of some steps: about the target, far from it, and none at all."""
    shape = (steps, segments, destinations, 4)
    counts = rng.integers(0, 3000, shape, dtype=np.int32)
    counts[..., 3] //= rng.choice([1, 20, 400, 5000], shape[:-1]).astype(np.int32)
    counts[rng.random(shape[:-1]) < 0.1] = 0
    counts[rng.random(shape[:-1]) < 0.1, 0] = 0
    counts[rng.random(shape[:-1]) < 0.05] = 2**31 - 1
    return torch.from_numpy(counts)


@both
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 7)])
def test_is_the_formulas_one_by_one(ops, shape):
    rng = np.random.default_rng(shape[1])
    segments, destinations = shape
    target = torch.from_numpy(rng.uniform(1, 2000, segments)).float()
    most, scale = torch.tensor([8.0, 1.0, 2.0])[:segments], torch.tensor([0.25, 0, 2])[:segments]
    first = torch.from_numpy(np.exp2(rng.uniform(-60, 60, shape))).float()
    state = first_state(segments, destinations, first)
    for counts in histories(rng, 60, *shape):
        wanted = state.clone()
        for i in range(segments):
            for j in range(destinations):
                row = one_by_one(
                    counts[i, j].tolist(), target[i].item(), most[i].item(), scale[i].item(),
                    state[:, i, j].tolist(),
                )  # fmt: skip
                wanted[:, i, j] = torch.tensor(np.array(row))
        ops.steer(counts, target, most, scale, state)
        assert oracle.same_bits(state, wanted)
    assert (state[BOOST] >= 1).all()


def test_the_cpu_has_the_bits_of_the_reference():
    rng = np.random.default_rng(9)
    shape = (5, 64)
    target = torch.from_numpy(rng.uniform(1, 2000, 5)).float()
    most, scale = torch.full((5,), 4.0), torch.tensor([0.0, 1, 2, 0.5, 0.25])
    states = [first_state(5, 64, 1e-3) for _ in range(2)]
    # Bounds hold from whatever a state begins.
    for state in states:
        state[BIAS, 0], state[EXPONENT, 1], state[BOOST, 2] = 0.5, 0.7, 16
    seen = set()
    for counts in histories(rng, 100, *shape):
        for ops, state in zip((reference, cpu), states, strict=True):
            ops.steer(counts, target, most, scale, state)
        assert oracle.same_bits(*states)
        seen |= set(states[0][BOOST].unique().tolist())
    assert seen == {1.0, 2.0, 4.0}


@both
def test_written_out(ops):
    """100 should be kept: of 400 above, by a factor of 95/65; of none above, of none at all."""
    counts = torch.zeros(1, 3, 4, dtype=torch.int32)
    counts[0, 0], counts[0, 1, 1] = torch.tensor([400, 5000, 100, 0]), 5000
    state = first_state(1, 3, 65.0)
    state[EXPONENT] = 0.25
    one = torch.ones(1)
    ops.steer(counts, 100 * one, one, one, state)
    assert torch.equal(state[THRESHOLD], torch.tensor([[95.0, 65 / 16, 65.0]]))
    assert torch.equal(state[STEP], torch.tensor([[64.0, 4.0, 64.0]]))


@both
def test_a_count_that_cannot_be_raises_on_no_rank(ops):
    """A state is refused for it; an exception in a step would be one rank's, and a hang."""
    counts = torch.tensor([[[-21, 100, 5, 0]]], dtype=torch.int32)
    state = first_state(1, 1, 16.0)
    state[EXPONENT] = 0.25  # the divisor of the factor is 0 then
    one = torch.ones(1)
    ops.steer(counts, 11 * one, one, one, state)
    assert state[THRESHOLD].item() == 1.0
