"""A lead: the owner of a shard undoes the lag of error feedback.

A reducer without a lead sends the same messages, and hands out what was sent: the other's formula
is over that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.units import matrix_plan, normal, reduce, unit_reducer
from tagc.collect import UnitReducer
from tagc.plan import UnitPlan

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
        for segment in (s for s in plan.segments if not s.compressed):
            span = slice(segment.start, segment.stop)
            torch.testing.assert_close(out[span], sent[span], **EXACT)
        for one, other in zip(ahead.residuals.values(), plain.residuals.values(), strict=True):
            torch.testing.assert_close(one, other, **EXACT)
    assert all(q.any() for q in last_sums(ahead))
    assert not plain.owner_states
