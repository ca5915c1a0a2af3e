"""One unit's compressed reduce-scatter against formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.exact import EXACT
from support.launching import sketch_of
from support.marks import slow
from support.units import reduce, spiky, unit_plan, unit_reducer
from tagc.codecs.sketch import SketchPlan
from tagc.codecs.sketch.threshold import Steer
from tagc.collect import UnitReducer
from tagc.ops import Ops
from tagc.ops.symbols import Symbol
from tagc.plan import UnitPlan

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def quantizer(symbol: Symbol, reducer: UnitReducer, i: int, owner: int) -> tuple[int, float]:
    """Levels such that a sum over ranks fits the lane, and the step of a sketched segment."""
    levels = (2 ** (symbol.bits - 1) - 1) // reducer.plan.info.world_size
    if symbol.bits == 32:
        # float32 must hold the levels, to clip at them: 24 bits and then zeros.
        low = 2 ** (levels.bit_length() - 24)
        levels = levels // low * low
    steering = sketch_of(reducer)
    exponent = math.frexp(steering.threshold[i, owner].item())[1] - 1
    step = 2.0 ** (exponent - ((levels + 1).bit_length() - 1) + symbol.headroom)
    return levels, step * steering.boost[i, owner].item()


class Oracle:
    """What all ranks of a unit send and keep, by formula, from all ranks' buffers."""

    def __init__(self, plan: UnitPlan) -> None:
        self.plan, self.W = plan, plan.info.world_size
        self.segments = list(plan.of(SketchPlan))
        self.residuals: list[Tensor] = []
        for segment in self.segments:
            assert segment.codec.feedback is not None
            shape = (self.W, self.W, segment.columns)
            self.residuals.append(torch.zeros(shape, dtype=segment.codec.feedback.dtype))
        self.counts = torch.zeros(len(self.segments), self.W, 4, dtype=torch.int32)

    def step(self, buffers: Tensor, reducer: UnitReducer, divisor: int) -> Tensor:
        """Every owner's shard `[W, S]` with a reducer's thresholds; NaN in the dense columns."""
        shards = torch.full((self.W, self.plan.columns), torch.nan, dtype=buffers.dtype)
        self.counts.zero_()
        for i, segment in enumerate(self.segments):
            columns = slice(segment.start, segment.stop)
            for owner in range(self.W):
                total = sum(
                    self._send(reducer, i, buffers[rank, owner, columns], rank, owner)
                    for rank in range(self.W)
                )
                assert isinstance(total, Tensor)
                shards[owner, columns] = (total.float() / divisor).to(buffers.dtype)
        return shards

    def _send(self, reducer: UnitReducer, i: int, grad: Tensor, rank: int, owner: int) -> Tensor:
        sketch = self.segments[i].codec
        assert isinstance(sketch, SketchPlan)
        symbol, n = sketch.symbol, grad.numel()
        x = grad.float() + self.residuals[i][rank, owner].float()
        groups = torch.zeros(math.ceil(n / symbol.lanes) * symbol.lanes)
        groups[:n] = x
        groups = groups.view(-1, symbol.lanes)
        size = groups.abs().amax(1)
        above = size >= sketch_of(reducer).threshold[i, owner]
        kept = above
        if sketch.capacity >= len(size):
            kept = size > 0
        elif above.sum() > sketch.capacity:
            order = sorted(range(len(size)), key=lambda g: (-size[g].item(), g))
            kept = torch.zeros_like(above)
            kept[order[: sketch.capacity]] = True
        levels, step = quantizer(symbol, reducer, i, owner)
        q = (groups.double() / step).clamp(-levels, levels).round()
        clipped = kept & (groups.abs() > levels * step).any(1)
        sent = torch.where(kept[:, None], q * step, 0.0)
        left = (groups.double() - sent).float().view(-1)[:n]
        self.residuals[i][rank, owner] = left.to(self.residuals[i].dtype)
        self.counts[i, owner] += torch.stack([t.sum() for t in (above, size > 0, kept, clipped)])
        return sent.view(-1)[:n]


@on_ranks(3)
@pytest.mark.parametrize(
    ("symbol", "stored", "dtype", "op"),
    [
        ("int8x4", "bfloat16", torch.bfloat16, SUM),
        ("int32x1", "float32", torch.float32, AVG),
        slow("int16x2", "float32", torch.bfloat16, AVG),
    ],
)
def test_output_is_the_sum_of_what_ranks_send(
    rank: int, world_size: int, symbol: str, stored: str, dtype: torch.dtype, op: Any
) -> None:
    plan = unit_plan(world_size, dtype, symbol=symbol, stored=stored)
    reducer, oracle = unit_reducer(plan), Oracle(plan)
    divisor = world_size if op == AVG else 1
    boosted = False
    for step in range(6):
        buffers = spiky(world_size, plan.columns, step).to(dtype)
        reducer._replays.clear()  # operators are bound once
        with counts_at_steering() as steered_by:
            out = reduce(reducer, buffers[rank], op)
        # The threshold moves by what all ranks counted one step before.
        torch.testing.assert_close(steered_by, [oracle.counts] if step else [], **EXACT)
        boosted |= bool((sketch_of(reducer).boost > 1).any())
        expected = oracle.step(buffers, reducer, divisor)[rank]
        for i, segment in enumerate(plan.of(SketchPlan)):
            span = slice(segment.start, segment.stop)
            residuals = list(reducer.residuals.values())
            torch.testing.assert_close(out[span], expected[span], **EXACT)
            torch.testing.assert_close(residuals[i], oracle.residuals[i][rank], **EXACT)
        for segment in plan.dense:
            span = slice(segment.start, segment.stop)
            exact = buffers[:, rank, span].double().sum(0) / divisor
            close: Any = {"rtol": 1e-5, "atol": 1e-5}
            if dtype == torch.bfloat16:
                close = {"rtol": 2e-2, "atol": 0.1}
            torch.testing.assert_close(out[span].double(), exact, **close)
    assert [count.unresolved for count in reducer.selection_counts()] == [0, 0]
    assert symbol != "int8x4" or boosted


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
