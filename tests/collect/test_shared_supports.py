"""Shared supports over many steps: quantization steps stay what the gradients ask for."""

from __future__ import annotations

import pytest
import torch

from support.distributed import on_ranks
from support.launching import launch, sketch_of
from support.units import codec_plan, normal, reduce, unit_reducer
from tagc.codecs.sketch.support import Collect, Spread
from tagc.ops.bitmap import to_bitmap


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


def test_every_group_of_a_support_has_a_cell() -> None:
    """In order, zeros behind, and back at its place."""
    groups, capacity = 1000, 300
    torch.manual_seed(0)
    kept = torch.rand(2, groups) < torch.tensor([[0.25], [0.0]])
    table = torch.randint(-(2**31), 2**31 - 1, (2, groups), dtype=torch.int32)
    cells = torch.full((2, capacity), 7, dtype=torch.int32)
    places = torch.empty(2, 1, groups, dtype=torch.int64)
    for row in range(2):
        launch(Collect(groups, capacity), to_bitmap(kept), table, cells, places[row], own=row)
    here = table[0][kept[0]]
    assert torch.equal(cells[0, : len(here)], here)
    assert not cells[0, len(here) :].any()
    assert not cells[1].any()
    for row in range(2):
        found = torch.empty(1, groups, dtype=torch.int32)
        launch(Spread(), cells[row : row + 1], places[row], found)
        assert torch.equal(found[0], table[row] * kept[row])
