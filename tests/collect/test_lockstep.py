"""Ranks that are not at the same collective, or at another part of a unit: an error on all of them
that names both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import fails, on_ranks
from support.exact import EXACT
from support.host_reducers import host_reducer, in_two_levels
from support.launching import missing_mask
from support.units import codec_plan, matrix_plan, on_grid, plan_of, unit_reducer, world
from tagc.collect import Transport, UnitReducer
from tagc.collect.lockstep import DesyncError
from tagc.plan import UnitPlan
from tagc.policy import Policy

SUM = dist.ReduceOp.SUM
A, B, C, D = (f"{name}.weight" for name in "abcd")
BITS = {"kind": "quantized", "bits": 4, "block": 32}
SKETCHES: list[dict[str, Any]] = [
    {"kind": "sketch", "density": 0.3},
    {"kind": "sketch", "density": 0.3, "support": "shared"},
]


def with_bits(codec: dict[str, Any]) -> UnitPlan:
    """A unit that sends one parameter by this codec, and another in bits."""
    rules = [{"when": {"name": f"{n}.*"}, "codec": c} for n, c in (("a", codec), ("c", BITS))]
    return plan_of(2, torch.float32, Policy.load({"schema": 1, "gradients": rules}))


def reduce_part(reducer: UnitReducer, buffer: Tensor, reached: set[str]) -> Tensor:
    """What FSDP would hand over of ``buffer`` ``[W, S]``, and what comes out, in the plan's columns
    and zero elsewhere."""
    missing = missing_mask(reducer.plan, reached)
    inp = buffer[:, ~missing]
    out = torch.full((inp.shape[1],), torch.nan, dtype=buffer.dtype)
    whole = not missing.any()
    reducer.reduce(out, inp.reshape(-1), world(), SUM, reached=None if whole else reached)
    found = torch.zeros(buffer.shape[1], dtype=buffer.dtype)
    found[~missing] = out
    return found


@on_ranks(2)
@pytest.mark.parametrize("codec", SKETCHES, ids=["sketch", "shared"])
def test_thresholds_do_not_follow_the_zeros(
    rank: int, world_size: int, codec: dict[str, Any]
) -> None:
    """Where a backward reaches nothing that the codec selects from, first or in between."""
    plan = with_bits(codec)
    disturbed, quiet = unit_reducer(plan), unit_reducer(plan)
    for step in range(4):
        zeros = torch.zeros(2, plan.columns)
        reduce_part(disturbed, zeros, {B, C})
        buffer = on_grid(2, plan.columns, step)[rank]
        one, other = (reduce_part(made, buffer, {A, B, C, D}) for made in (disturbed, quiet))
        mine = slice(0, 911)
        torch.testing.assert_close(one[mine], other[mine], **EXACT)


@on_ranks(4)
def test_ranks_that_reach_different_parameters_get_an_error(rank: int, world_size: int) -> None:
    """Of equal sizes, too; and on hosts, where neighbours differ, and where hosts do."""
    plan = matrix_plan(world_size, {"kind": "matrix"}, {"kind": "none"})
    for mine, others in (({"c0.weight"}, {"c1.weight"}), ({"b.weight"}, {"a.weight"})):
        buffer = on_grid(world_size, plan.columns, 0)[rank]
        with pytest.raises(DesyncError, match="some of its parameters only"):
            reduce_part(unit_reducer(plan), buffer, mine if rank == 0 else others)
    plan = in_two_levels(codec_plan(4, BITS), BITS)
    for differs in (rank % 2, rank // 2):
        buffer = on_grid(4, plan.columns, 0)[rank]
        with (
            host_reducer(rank, plan) as reducer,
            pytest.raises(DesyncError, match="some of its parameters only"),
        ):
            reduce_part(reducer, buffer, {A} if differs else {C})


def reducer(label: str) -> UnitReducer:
    plan = codec_plan(2, {"kind": "quantized"})
    return unit_reducer(replace(plan, info=replace(plan.info, name=label)))


@on_ranks(2)
def test_a_rank_that_is_a_step_behind(rank: int, world_size: int) -> None:
    """As after a load of states of different steps. Units that a rank leaves out are in
    `tests/attach/test_desyncs.py`."""
    unit = reducer("a")
    out, buffer = torch.empty(unit.plan.columns), torch.randn(2 * unit.plan.columns)
    unit.reduce(out, buffer, world(), SUM)
    unit.counters.steps += rank
    kind, text = fails(lambda: unit.reduce(out, buffer, world(), SUM))
    assert kind == "DesyncError", text
    assert "(step 1, " in text
    assert "(step 2, " in text


@on_ranks(2)
def test_without_messages_a_stamp_tells(rank: int, world_size: int) -> None:
    """Collectives of equal sizes take what they get, as NCCL's would: of another unit, or part."""
    with patch.object(Transport, "by_messages", return_value=False):
        a, b, c = (reducer(label) for label in "abc")

        def reduce(unit: UnitReducer, name: str | None) -> None:
            columns = {"a.weight": 911, "c.weight": 303, None: unit.plan.columns}[name]
            out, inp = torch.empty(columns), torch.ones(2 * columns)
            unit.reduce(out, inp, world(), SUM, reached=None if name is None else {name})

        for calls in ([(a, None), (b, None)], [(c, "a.weight"), (c, "c.weight")]):
            for unit, name in 2 * calls:  # so both were called as often
                reduce(unit, name)
            unit, name = calls[rank]
            kind, text = fails(partial(reduce, unit, name))
            assert kind == "RuntimeError", text
            assert f"of unit '{unit.plan.info.label}' got a message of another unit" in text


@on_ranks(2)
def test_a_sketch_that_a_part_left_out_begins_together(rank: int, world_size: int) -> None:
    """Before its first message a sketch gathers thresholds: not while others are elsewhere."""
    plan = with_bits(SKETCHES[0])
    sketch = unit_reducer(plan)
    sketch.reduce(torch.empty(303), torch.ones(606), world(), SUM, reached={"c.weight"})
    unit = sketch if rank == 0 else reducer("other")
    shard, buffer = torch.empty(plan.columns), torch.randn(2 * plan.columns)
    kind, text = fails(lambda: unit.reduce(shard, buffer, world(), SUM))
    assert kind == "DesyncError", text
