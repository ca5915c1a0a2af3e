"""An average over replicas in two shots: conserved, alike on all copies, and no more bytes than
planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.exact import EXACT
from support.units import codec_plan, gathered, matrix_plan, on_grid, reduce, unit_reducer
from tagc.comm import UnitReducer
from tagc.plan import UnitPlan, in_two_shots, slices_of

CODECS: dict[str, dict[str, Any]] = {
    "quantized": {"kind": "quantized", "bits": 4, "block": 32},
    "matrix": {"kind": "matrix"},
    "groups": {"kind": "matrix", "group": 8},
}
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def planned(copies: int, codec: str, feedback: str = "residual", **more: Any) -> UnitPlan:
    """A unit with two compressed segments and two dense ones, averaged over replicas."""
    make = codec_plan if codec == "quantized" else matrix_plan
    return in_two_shots(
        make(copies, CODECS[codec], {"kind": feedback, **more}, direction="replicas")
    )


def owed(reducer: UnitReducer) -> Tensor:
    """Of every element of the shard, what this rank owes of its own, and as an owner: ``[2, S]``
    float64."""
    plan, owner = reducer.plan, dist.get_rank()
    total = torch.zeros(2, plan.columns, dtype=torch.float64)
    for segment in plan.compressed:
        own, of_sum = (r[segment.start] for r in (reducer.residuals, reducer.owner_residuals))
        for piece in slices_of(plan, segment):
            columns = slice(piece.start, piece.start + piece.length)
            at = slice(piece.column, piece.column + piece.length)
            total[0, columns] = own[piece.row, at].double()
            if piece.row == owner:
                total[1, columns] = of_sum[0, at].double()
    return total


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("codec", ["quantized"])
def test_nothing_is_lost(rank: int, world_size: int, codec: str) -> None:
    """To the bit on a grid: what was handed out, what ranks owe, and what owners owe of the sums,
    is what came in; and all copies got the same bits, in as many bytes as planned."""
    plan = planned(world_size, codec)
    reducer = unit_reducer(plan)
    came_in = torch.zeros(plan.columns, dtype=torch.float64)
    handed_out = torch.zeros(plan.columns, dtype=torch.float64)
    for step in range(5):
        buffers = on_grid(world_size, plan.columns, step)[:, 0]
        came_in += buffers.double().sum(0)
        out = reduce(reducer, buffers[rank], SUM)
        handed_out += out.double()
        for other in gathered(out):
            torch.testing.assert_close(other, out, **EXACT)
        debts = gathered(owed(reducer)).sum(0)  # [2, S]
        torch.testing.assert_close(handed_out + debts.sum(0), came_in, **EXACT)
        assert bool(debts.any(1).all())
    assert reducer.wire_bytes == 5 * sum(map(plan.wire_bytes, plan.segments))
