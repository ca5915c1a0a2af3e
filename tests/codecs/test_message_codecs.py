"""Codecs that travel in messages, one unit on several ranks: `quantized`, `dense`, and sketches.

The oracles here work on all ranks' buffers, by formula, and know nothing of messages.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support import oracle
from support.distributed import on_ranks
from support.exact import EXACT
from support.launching import sketch_of
from support.units import codec_plan, gathered, normal, on_grid, reduce, unit_reducer
from tagc.ops.bitmap import from_bitmap
from tagc.plan import UnitPlan

SUM = dist.ReduceOp.SUM
BF16 = {"kind": "dense", "wire": "bfloat16"}
PLAIN = {"kind": "residual"}


def spans(plan: UnitPlan) -> list[slice]:
    return [slice(s.start, s.stop) for s in plan.compressed]


class LoCo:
    """DeepSpeed's rule, written out: ``h = g + e``, send ``q(h)``, then
    ``e = beta * e + (1 - beta) * (h - q(h))``, and ``e = 0`` every ``reset`` steps."""

    def __init__(self, columns: int, bits: int, block: int, beta: float, reset: int) -> None:
        self.error = torch.zeros(columns)
        self.bits, self.block, self.beta, self.reset = bits, block, beta, reset
        self.steps = 0

    def send(self, gradient: Tensor) -> Tensor:
        if self.steps and self.steps % self.reset == 0:
            self.error = torch.zeros_like(self.error)
        self.steps += 1
        h = gradient + self.error
        sent = torch.from_numpy(oracle.quantize_row(h.numpy(), self.bits, self.block))
        left = (h.double() - sent).float()
        self.error = self.beta * self.error + (1 - self.beta) * left
        return sent


@on_ranks(3)
def test_average_feedback_is_loco(rank: int, world_size: int) -> None:
    codec = {"kind": "quantized", "bits": 4, "block": 64}
    feedback = {"kind": "average", "beta": 0.75, "reset_steps": 3}
    plan = codec_plan(world_size, codec, feedback)
    reducer = unit_reducer(plan, "cpu")
    senders = [
        [LoCo(s.stop - s.start, 4, 64, 0.75, 3) for s in spans(plan)] for _ in range(world_size)
    ]
    for step in range(5):
        buffers = normal(world_size, plan.columns, step)
        out = reduce(reducer, buffers[rank])
        for i, span in enumerate(spans(plan)):
            total = sum(senders[r][i].send(buffers[r, rank, span]) for r in range(world_size))
            assert isinstance(total, Tensor)
            # The owner adds in float32: half an ulp an addition, one for the division.
            size = buffers[:, rank, span].abs().sum(0) + 1
            bound = (world_size + 1) * 2**-24 * 8 * size.double()
            assert ((out[span].double() - total / world_size).abs() <= bound).all(), step
            mine = list(reducer.residuals.values())[i][rank]
            torch.testing.assert_close(mine, senders[rank][i].error, **EXACT)


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_rounds_once_and_adds_in_float32(
    rank: int, world_size: int, dtype: torch.dtype
) -> None:
    plan = codec_plan(world_size, BF16, dtype=dtype)
    reducer = unit_reducer(plan)
    buffers = normal(world_size, plan.columns, 0).to(dtype)
    out = reduce(reducer, buffers[rank])
    sent = buffers[:, rank].clone()
    for span in spans(plan):
        sent[:, span] = sent[:, span].bfloat16().to(dtype)
    expected = (sent.float().sum(0) / world_size).to(dtype)
    torch.testing.assert_close(out, expected, rtol=2**-20 if dtype == torch.float32 else 0, atol=0)
    # 456, 152, and 32 + 8 or 16 + 4 words; then a stamp, to a multiple of 32.
    assert reducer.wire_bytes == 4 * (world_size - 1) * (672 if dtype == torch.float32 else 640)


@on_ranks(2)
def test_a_sketch_hashes_anew_in_every_step(rank: int, world_size: int) -> None:
    """Else groups that collide once would collide for ever."""
    plan = codec_plan(world_size, {"kind": "sketch", "density": 0.3})
    reducer = unit_reducer(plan)
    sketch = sketch_of(reducer)
    seeds = []
    for step in range(4):
        reduce(reducer, normal(world_size, plan.columns, step)[rank])
        seeds.append(int(sketch.seed))
    assert len(set(seeds)) == 4


# Shared support

SHARED = {"kind": "sketch", "density": 0.3, "symbol": "int32x1", "support": "shared"}


@on_ranks(2)
def test_all_ranks_send_the_groups_that_the_owner_chose(rank: int, world_size: int) -> None:
    plan = codec_plan(world_size, SHARED, PLAIN)
    reducer = unit_reducer(plan, "cpu")
    chosen: list[set[int]] = []
    span = spans(plan)[0]
    for step in range(32):
        support = sketch_of(reducer).supports[0]
        everywhere = gathered(support)
        torch.testing.assert_close(everywhere[0], everywhere[rank], **EXACT)
        groups = from_bitmap(support[rank], 911).nonzero().flatten()
        chosen.append(set(groups.tolist()))
        out = reduce(reducer, normal(world_size, plan.columns, step)[rank])
        assert set(out[span].nonzero().flatten().tolist()) <= chosen[-1]
    assert max(map(len, chosen)) <= 0.3 * 1.0625 * 911 + 1
    # The window has been everywhere: 29 words, one a step.
    assert set().union(*chosen) == set(range(911))


@on_ranks(2)
def test_a_shared_sketch_keeps_what_its_owner_owes_most(rank: int, world_size: int) -> None:
    """What the owner owes comes in the second step; what only others do waits for the window."""
    plan = codec_plan(world_size, SHARED, PLAIN)
    reducer = unit_reducer(plan)
    span = spans(plan)[0]
    for step in range(3):
        buffers = 2**-10 * on_grid(world_size, plan.columns, step)
        # In the last words, where the window does not come that soon.
        for owner in range(2):
            buffers[owner, owner, span.start + 800] += 1.0
            buffers[owner, owner, span.start + 880] = 0.0
            buffers[1 - owner, owner, span.start + 880] += 1.0
        out = reduce(reducer, buffers[rank], SUM)
        assert bool(out[span.start + 800]) == (step > 0)
        assert not out[span.start + 880]
