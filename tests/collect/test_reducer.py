"""Thresholds of sketches follow the counts of all ranks. What is sent with them is in
`test_conservation.py`, and how they move in `tests/codecs/test_threshold.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from support.distributed import on_ranks
from support.launching import sketch_of
from support.units import gathered, normal, reduce, unit_plan, unit_reducer
from tagc.codecs.sketch import SketchPlan
from tagc.codecs.sketch.threshold import Steer
from tagc.ops import Ops

LANES = 4


@contextmanager
def counts_at_steering() -> Iterator[list[Tensor]]:
    """Copies of the counts that thresholds are moved by."""
    seen: list[Tensor] = []
    original = Steer.bound

    def bound(self: Steer, ops: Ops, own: int) -> Callable[..., object]:
        steer = original(self, ops, own)
        return lambda counts, *rest: (seen.append(counts.clone()), steer(counts, *rest))

    with patch.object(Steer, "bound", bound):
        yield seen


@on_ranks(3)
def test_thresholds_follow_what_all_ranks_counted_one_step_before(
    rank: int, world_size: int
) -> None:
    plan = unit_plan(world_size, symbol="int8x4")
    reducer = unit_reducer(plan)
    thresholds: list[Tensor] = []
    above = torch.empty(0)  # groups that reach the threshold: [segments, owners]
    for step in range(4):
        grad = normal(world_size, plan.columns, step)[rank]  # [W, S]
        sizes = []
        sketched = [s for s in plan.segments if isinstance(s.codec, SketchPlan)]
        for segment, residual in zip(sketched, reducer.residuals.values(), strict=True):
            x = grad[:, segment.start : segment.stop] + residual
            padded = torch.nn.functional.pad(x, (0, -x.shape[1] % LANES))
            sizes.append(padded.view(world_size, -1, LANES).abs().amax(2))
        reducer._replays.clear()  # operators are bound once
        reducer._usual = None
        with counts_at_steering() as steered_by:
            reduce(reducer, grad)
        assert len(steered_by) == (step > 0)
        if step > 0:
            assert torch.equal(steered_by[0][..., 0], above)
        thresholds.append(sketch_of(reducer).threshold.clone())
        counts = [
            (size >= threshold[:, None]).sum(1)
            for size, threshold in zip(sizes, thresholds[-1], strict=True)
        ]
        above = gathered(torch.stack(counts)).sum(0).int()
        for other in gathered(thresholds[-1]):
            assert torch.equal(other, thresholds[-1])
    assert (thresholds[-1] != thresholds[0]).all()
    assert all(count.unresolved == 0 for count in reducer.selection_counts())
