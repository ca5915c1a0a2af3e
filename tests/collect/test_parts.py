"""Backwards that reach a part of a unit: nothing is lost, and what is owed for the rest waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.exact import EXACT
from support.host_reducers import host_reducer, in_two_levels
from support.launching import missing_mask
from support.units import codec_plan, matrix_plan, on_grid, plan_of, unit_reducer
from tagc.collect import UnitReducer
from tagc.collect.lockstep import DesyncError
from tagc.plan import UnitPlan
from tagc.policy import Policy

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
A, B, C, D = (f"{name}.weight" for name in "abcd")
ALL = [
    {"kind": "quantized", "bits": 4, "block": 32},
    {"kind": "sketch", "density": 0.3},
    {"kind": "sketch", "density": 0.3, "support": "shared"},
]


def reduce_part(reducer: UnitReducer, buffer: Tensor, reached: set[str], op: Any = SUM) -> Tensor:
    """What FSDP would hand over of ``buffer`` ``[W, S]``, and what comes out, in the plan's columns
    and zero elsewhere."""
    group = dist.group.WORLD
    assert group is not None
    missing = missing_mask(reducer.plan, reached)
    inp = buffer[:, ~missing]
    out = torch.full((inp.shape[1],), torch.nan, dtype=buffer.dtype)
    whole = not missing.any()
    reducer.reduce(out, inp.reshape(-1), group, op, reached=None if whole else reached)
    found = torch.zeros(buffer.shape[1], dtype=buffer.dtype)
    found[~missing] = out
    return found


def only(buffers: Tensor, plan: UnitPlan, reached: set[str]) -> Tensor:
    """The buffers, zero for parameters that were not reached."""
    missing = missing_mask(plan, reached)
    return buffers.masked_fill(missing, 0)


def owed(reducer: UnitReducer) -> Tensor:
    """``[D, S]`` float64."""
    plan = reducer.plan
    total = torch.zeros(plan.messages.made, plan.columns, dtype=torch.float64)
    for segment in plan.compressed:
        total[:, segment.start : segment.stop] = reducer.residuals[segment.start]
    return total


def states(reducer: UnitReducer) -> dict[int, Tensor]:
    return {i: state.clone() for i, state in reducer.owner_states.items()}


@on_ranks(2)
@pytest.mark.parametrize(
    "feedback",
    [{"kind": "residual", "lead": 0.4}, {"kind": "average", "dtype": "bfloat16"}],
    ids=["lead", "average"],
)
def test_what_owners_keep_waits_too(rank: int, world_size: int, feedback: dict[str, Any]) -> None:
    plan = codec_plan(2, ALL[0], feedback)
    reducer, other = unit_reducer(plan), unit_reducer(plan)
    buffers = on_grid(2, plan.columns, 0)
    for made in (reducer, other):
        reduce_part(made, buffers[rank], {A, B, C, D})
    kept, debts = states(reducer), owed(reducer)
    again = only(on_grid(2, plan.columns, 1), plan, {A})
    found = reduce_part(reducer, again[rank], {A})
    missing = missing_mask(plan, {A})
    torch.testing.assert_close(owed(reducer)[:, missing], debts[:, missing], **EXACT)
    for i, state in states(reducer).items():
        segment = next(s for s in plan.segments if s.start == i)
        same = segment.params[0].name != A
        assert torch.equal(state, kept[i]) == same
    # Those that were reached get what they would have got with zeros for the rest.
    full = reduce_part(other, again[rank], {A, B, C, D})
    torch.testing.assert_close(found[~missing], full[~missing], **EXACT)


@on_ranks(2, 3)
def test_dense_parameters_alone_are_not_sent_in_a_message(rank: int, world_size: int) -> None:
    plan = codec_plan(world_size, ALL[0], {"kind": "residual"})
    reducer = unit_reducer(plan)
    buffers = only(on_grid(world_size, plan.columns, 0), plan, {B, D})
    found = reduce_part(reducer, buffers[rank], {B, D}, AVG)
    torch.testing.assert_close(found, buffers[:, rank].mean(0), rtol=2.0**-23, atol=0)
    assert reducer.wire_bytes == (world_size - 1) * 4 * (30 + 5)


@on_ranks(2)
@pytest.mark.parametrize("codec", ALL[1:], ids=["sketch", "shared"])
def test_thresholds_do_not_follow_the_zeros(
    rank: int, world_size: int, codec: dict[str, Any]
) -> None:
    """Where a backward reaches nothing that the codec selects from, first or in between."""
    rules = {
        "schema": 1,
        "gradients": [
            {"when": {"name": "a.*"}, "codec": codec},
            {"when": {"name": "c.*"}, "codec": ALL[0]},
        ],
    }
    plan = plan_of(2, torch.float32, Policy.load(rules))
    disturbed, quiet = unit_reducer(plan), unit_reducer(plan)
    for step in range(4):
        zeros = torch.zeros(2, plan.columns)
        reduce_part(disturbed, zeros, {B, C})
        buffer = on_grid(2, plan.columns, step)[rank]
        one, other = (reduce_part(made, buffer, {A, B, C, D}) for made in (disturbed, quiet))
        mine = slice(0, 911)
        torch.testing.assert_close(one[mine], other[mine], **EXACT)


@on_ranks(4)
def test_ranks_that_reach_different_parameters_are_told(rank: int, world_size: int) -> None:
    """Of equal sizes, too; and on hosts, where neighbours differ, and where hosts do."""
    plan = matrix_plan(world_size, {"kind": "matrix"}, {"kind": "none"})
    for mine, others in (({"c0.weight"}, {"c1.weight"}), ({"b.weight"}, {"a.weight"})):
        buffer = on_grid(world_size, plan.columns, 0)[rank]
        with pytest.raises(DesyncError, match="some of its parameters only"):
            reduce_part(unit_reducer(plan), buffer, mine if rank == 0 else others)
    plan = in_two_levels(codec_plan(4, ALL[0]), ALL[0])
    for differs in (rank % 2, rank // 2):
        buffer = on_grid(4, plan.columns, 0)[rank]
        with (
            host_reducer(rank, plan) as reducer,
            pytest.raises(DesyncError, match="some of its parameters only"),
        ):
            reduce_part(reducer, buffer, {A} if differs else {C})
