"""Sums near the end of float16's range, which a loss scale makes gradients fill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.distributed import on_ranks
from support.units import codec_plan, matrix_plan, reduce, unit_reducer

F16, SUM = torch.float16, dist.ReduceOp.SUM
LARGEST = torch.finfo(F16).max
PLAIN, LEADING = {"kind": "residual"}, {"kind": "residual", "lead": 0.5}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"kind": "quantized", "bits": 8}, PLAIN),
    ({"kind": "quantized", "bits": 4}, LEADING),
    ({"kind": "sketch", "density": 1.0, "symbol": "int8x4"}, PLAIN),
    ({"kind": "matrix", "level": 1.3}, PLAIN),
    ({"kind": "dense", "wire": "bfloat16"}, {"kind": "none"}),
]


@on_ranks(2)
@pytest.mark.parametrize(("codec", "feedback"), CASES, ids=str)
def test_sums_inside_the_range_stay_there(
    rank: int, world_size: int, codec: dict[str, Any], feedback: dict[str, Any]
) -> None:
    plan = (matrix_plan if codec["kind"] == "matrix" else codec_plan)(
        world_size, codec, feedback, F16
    )
    reducer = unit_reducer(plan)
    signs = torch.where(torch.arange(plan.columns) % 3 == 0, -1.0, 1.0)
    ends = 0
    for step in range(4):
        # As FSDP does it in float16: divided before, summed.
        size = LARGEST * (1 - step * 2**-8) / world_size
        gradient = (size * signs).to(F16).repeat(world_size, 1)
        out = reduce(reducer, gradient, SUM)
        assert bool(out.isfinite().all()), step
        ends += int((out.abs() == LARGEST).sum())
    assert ends
    # An overflow is one still, as is what is not finite on one rank.
    over = reduce(reducer, (3 * LARGEST / 4 * signs).to(F16).repeat(world_size, 1), SUM)
    dense = [s for s in plan.segments if not s.compressed]
    assert all(bool(over[s.start : s.stop].isinf().all()) for s in dense)
    if codec["kind"] != "matrix" and feedback is PLAIN:
        assert bool(over.isinf().all())
    bad = gradient.clone()
    if rank == 1:
        bad[:, 7] = torch.inf
    assert not bool(reduce(reducer, bad, SUM)[7].isfinite())
