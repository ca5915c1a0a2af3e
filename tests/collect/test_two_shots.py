"""An average over replicas in two shots: conserved, alike on all copies, and no more bytes than
planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.exact import EXACT
from support.units import codec_plan, gathered, matrix_plan, on_grid, reduce, unit_reducer
from tagc.collect import UnitReducer
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


@on_ranks(3)
def test_the_average_of_what_one_shot_adds_up(rank: int, world_size: int) -> None:
    """Blocks are the segment's own, so that owners add up what everybody would in one shot: what
    is dense comes out the same to the bit, and what is not after another rounding, no further off
    than half a step of 8 bits. In bfloat16 likewise, from sums in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        codec = CODECS["quantized"] | {"bits": 8}
        one = codec_plan(3, codec, {"kind": "none"}, dtype, direction="replicas")
        one = replace(one, shots=None)
        grad = on_grid(3, one.columns, 5)[rank, 0].to(dtype)
        whole, sliced = (
            reduce(unit_reducer(plan), grad, AVG).float() for plan in (one, in_two_shots(one))
        )
        for segment in one.dense:
            here = slice(segment.start, segment.stop)
            torch.testing.assert_close(sliced[here], whole[here], **EXACT)
        for segment in one.compressed:
            here = slice(segment.start, segment.stop)
            size, off = in_blocks(whole[here].abs()), in_blocks((sliced - whole)[here].abs())
            step = size.amax(1, keepdim=True) / 127 * (1 + 2**-7)
            assert bool((off <= step / 2 + size * 2 * torch.finfo(dtype).eps).all())
            assert off.any()


def in_blocks(elements: Tensor) -> Tensor:
    """``[blocks, 32]``, filled up with zeros."""
    return torch.nn.functional.pad(elements, (0, -len(elements) % 32)).view(-1, 32)


@on_ranks(3)
@pytest.mark.parametrize("codec", ["quantized", "groups"])
def test_what_is_not_finite_is_seen_by_all_copies(rank: int, world_size: int, codec: str) -> None:
    """In the same block or row, and nowhere else; and never in what anybody owes."""
    plan = planned(world_size, codec)
    reducer = unit_reducer(plan)
    fine = on_grid(world_size, plan.columns, 1)[rank, 0]
    broken = fine.clone()
    first, norm = plan.compressed[0].start, plan.dense[0].start
    if rank == 1:
        broken[first + 40] = torch.inf
        broken[norm] = torch.nan
    for grad, finite in ((fine, True), (broken, False), (fine, True)):
        out = reduce(reducer, grad, AVG)
        for other in gathered(out):
            torch.testing.assert_close(other, out, equal_nan=True, **EXACT)
        lost = ~out.isfinite()
        length = 32 if codec == "quantized" else 70
        block = first + 40 // length * length
        expected = torch.zeros_like(lost)
        if not finite:
            expected[block : block + length] = expected[norm] = True
        torch.testing.assert_close(lost, expected)
        assert bool(owed(reducer).isfinite().all())
