"""Ranks that are not at the same collective: an error on all of them that names both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from support.failing import fails
from support.host_reducers import host_reducer, in_two_levels
from support.units import codec_plan, plan_of
from tagc.codecs.workspace import Workspace
from tagc.collect import Transport, UnitReducer
from tagc.ops import get_ops
from tagc.policy import Policy

QUANTIZED = {"when": {"name": "*"}, "codec": {"kind": "quantized", "bits": 8, "block": 32}}
SKETCH = {"when": {"name": "*"}, "codec": {"kind": "sketch", "density": 0.3}}
POLICIES: dict[str, dict[str, Any]] = {
    "8 bits": {"schema": 1, "gradients": [QUANTIZED], "parameters": [QUANTIZED]},
    "sketch": {"schema": 1, "gradients": [SKETCH]},
    "hybrid": {"schema": 1, "gradients": [SKETCH], "parameters": [QUANTIZED]},
}


class Skipping(nn.Module):
    """Three blocks, of which any can be left out; the first is as large as the second."""

    def __init__(self, last: int) -> None:
        super().__init__()
        sizes = [(16, 16), (16, 16), (16, last)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)

    def forward(self, x: Tensor, skipped: int | None) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != skipped:
                x = block(x)
        return x.square().sum()


def skipping(policy: Any, last: int = 16) -> Any:
    torch.manual_seed(1)
    model = Skipping(last)
    for block in model.blocks:
        fully_shard(block)
    return wrap(fully_shard(model), policy)


@pytest.mark.some(3)
@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "skipped", "last"),
    [
        ("8 bits", 0, 40),
        ("8 bits", 1, 16),
        ("hybrid", 1, 40),
        ("sketch", 1, 16),
    ],
)
def test_a_rank_that_leaves_out_a_unit(
    rank: int, world_size: int, name: str, skipped: int, last: int
) -> None:
    """One rank in this step, another one in the next: never a result with another unit's message,
    and never a crash of the process."""
    model = skipping(POLICIES[name], last)
    x = torch.randn(4, 16)
    model(x, None).backward()

    def steps() -> None:
        for leaves_out in (1, 0):
            model(x, skipped if rank == leaves_out else None).backward()

    kind, text = fails(steps)
    assert kind == "DesyncError", text
    assert "ranks are at different collectives" in text, text
    # Whether in forward or in backward: the one that was left out, and the next.
    assert f"unit 'blocks.{skipped}'" in text
    assert text.count("of unit") == 2
    assert "some ranks leave out" in text
    assert "the gathering of parameters" in text


@on_ranks(2)
def test_a_rank_that_is_a_step_behind(rank: int, world_size: int) -> None:
    """As after a load of states of different steps."""
    model = skipping(POLICIES["8 bits"])
    x = torch.randn(4, 16)
    model(x, None).backward()
    if rank == 1:
        for reducer in tagc.compressor(model).reducers:
            reducer.counters.steps += 1
    kind, text = fails(lambda: model(x, None).backward())
    assert kind == "DesyncError", text
    assert "(step 1, " in text
    assert "(step 2, " in text


SUM = dist.ReduceOp.SUM


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def reducer(label: str) -> UnitReducer:
    cpu = torch.device("cpu")
    plan = codec_plan(2, {"kind": "quantized"}, {"kind": "residual"})
    plan = replace(plan, info=replace(plan.info, name=label))
    return UnitReducer(plan, get_ops(cpu), cpu, Workspace(cpu), seed=1)


@on_ranks(2)
def test_a_stamp_tells_of_other_parts_of_a_unit(rank: int, world_size: int) -> None:
    """Messages have the same size, whatever a backward reached."""
    with patch.object(Transport, "by_messages", return_value=False):
        unit = reducer("a")

        def reduce(name: str) -> None:
            columns = {"a.weight": 911, "c.weight": 303}[name]
            out, inp = torch.empty(columns), torch.ones(2 * columns)
            unit.reduce(out, inp, world(), SUM, reached={name})

        for name in ("a.weight", "c.weight", "a.weight"):
            reduce(name)
        kind, text = fails(lambda: reduce("a.weight" if rank == 0 else "c.weight"))
        assert kind == "RuntimeError", text
        assert "got a message of another unit" in text


@on_ranks(2)
def test_without_messages_a_stamp_tells(rank: int, world_size: int) -> None:
    """Collectives of equal sizes take what they get, as NCCL's would."""
    with patch.object(Transport, "by_messages", return_value=False):
        a, b = reducer("a"), reducer("b")
        shard, buffer = torch.empty(a.plan.columns), torch.randn(2 * a.plan.columns)
        for _ in range(3):
            for each in (a, b):
                each.reduce(shard, buffer, world(), SUM)
        first, second = (a, b) if rank == 0 else (b, a)
        for each in (first, second):
            kind, text = fails(lambda each=each: each.reduce(shard, buffer, world(), SUM))
            assert kind == "RuntimeError", text
            assert "got a message of another unit" in text
            assert f"of unit '{'a' if each is a else 'b'}'" in text


SKETCH_AND_BITS = [
    {"when": {"name": ["a.*"]}, "codec": {"kind": "sketch", "density": 0.3, "symbol": "int8x4"}},
    {"when": {"name": ["c.*"]}, "codec": {"kind": "quantized"}},
]


@on_ranks(2)
def test_a_sketch_that_a_part_left_out_begins_together(rank: int, world_size: int) -> None:
    """Before its first message a sketch gathers thresholds: not while others are elsewhere."""
    cpu = torch.device("cpu")
    rules = Policy.load({"schema": 1, "gradients": SKETCH_AND_BITS})
    plan = plan_of(2, torch.float32, rules)
    sketch = UnitReducer(plan, get_ops(cpu), cpu, Workspace(cpu), seed=1)
    sketch.reduce(torch.empty(303), torch.ones(606), world(), SUM, reached={"c.weight"})
    unit = sketch if rank == 0 else reducer("other")
    shard, buffer = torch.empty(plan.columns), torch.randn(2 * plan.columns)
    kind, text = fails(lambda: unit.reduce(shard, buffer, world(), SUM))
    assert kind == "DesyncError", text


@on_ranks(4)
def test_ranks_at_different_units_on_hosts(rank: int, world_size: int) -> None:
    """Inside a host and between hosts: an error with the names of both."""
    codec = {"kind": "quantized", "bits": 8}
    plan = in_two_levels(codec_plan(world_size, codec), codec)
    mine = "second" if rank in (0, 3) else "first"
    renamed = replace(plan, info=replace(plan.info, name=mine))
    out, buffer = torch.zeros(plan.columns), torch.ones(world_size * plan.columns)
    for micro in (False, True):
        with host_reducer(rank, renamed, crosses=lambda micro=micro: not micro) as reducer:
            kind, text = fails(lambda r=reducer: r.reduce(out, buffer, world(), SUM))
        assert kind == "DesyncError"
        assert "unit 'first'" in text
        assert "unit 'second'" in text
