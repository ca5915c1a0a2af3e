"""Shared supports over many steps: quantization steps stay what the gradients ask for."""

from __future__ import annotations

import pytest
import torch

from support.distributed import on_ranks
from support.launching import sketch_of
from support.units import codec_plan, normal, reduce, unit_reducer


@on_ranks(2)
@pytest.mark.parametrize("density", [0.25, 0.9])
def test_steps_of_stationary_gradients_stay(rank: int, world_size: int, density: float) -> None:
    """The support is smaller than its target, as chosen and explored groups overlap."""
    codec = {"kind": "sketch", "density": density, "symbol": "int8x4", "support": "shared"}
    plan = codec_plan(world_size, codec)
    reducer = unit_reducer(plan)
    steps = []
    for step in range(200):
        reduce(reducer, normal(world_size, plan.columns, step)[rank])
        steps.append(sketch_of(reducer).step.clone())
    settled = torch.stack(steps[50:])
    assert bool((settled.amax(0) <= 4 * settled.amin(0)).all()), settled[::30].flatten(1)
