"""On every route, with every codec: nothing is lost, whatever backwards reach and wherever they
stop, and what ranks do not reach is owed as before."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.block_net import wrap
from support.conservation import Accounts, planned
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import sharded
from support.host_reducers import host_reducer, in_two_levels
from support.launching import missing_mask, sketch_of
from support.marks import slow
from support.units import gathered, matrix_plan, normal, on_grid, unit_reducer, world
from tagc.codecs.sketch import SketchPlan
from tagc.collect import ReplicaAverage, UnitReducer
from tagc.plan import bytes_in_step, bytes_inside

SUM = dist.ReduceOp.SUM
STEPS = 6

CODECS: dict[str, dict[str, Any]] = {
    "quantized 4": {"kind": "quantized", "bits": 4, "block": 32},
    "quantized 8": {"kind": "quantized", "bits": 8, "block": 128},
    "sketch int8x4": {"kind": "sketch", "density": 0.3, "symbol": "int8x4"},
    "sketch int16x2": {"kind": "sketch", "density": 0.3, "symbol": "int16x2"},
    "sketch int32x1": {"kind": "sketch", "density": 0.3, "symbol": "int32x1"},
    "shared int8x4": {"kind": "sketch", "density": 0.7, "symbol": "int8x4", "support": "shared"},
    "shared int32x1": {"kind": "sketch", "density": 0.3, "symbol": "int32x1", "support": "shared"},
    "matrix 1": {"kind": "matrix", "level": 1.3},
    "matrix 2": {"kind": "matrix", "bits": 2},
    "matrix warm": {"kind": "matrix", "bits": 2, "warmup_steps": 2},
    "sketch warm": {"kind": "sketch", "density": 0.3, "symbol": "int8x4", "warmup_steps": 3},
}
FEEDBACKS: dict[str, dict[str, Any]] = {
    "float32": {"kind": "residual"},
    "bfloat16": {"kind": "residual", "dtype": "bfloat16"},
    "lead": {"kind": "residual", "lead": 0.5},
}
NUMBERS: dict[str, Callable[[int, int, int], Tensor]] = {"grid": on_grid, "normal": normal}


@dataclass
class Backward:
    """A reducer in its route: hand over the gradients of one backward, get the sum."""

    reducer: UnitReducer
    stays: bool = False

    def __call__(self, buffer: Tensor, reached: set[str], *, stays: bool) -> Tensor:
        """``[W, S]``, zero for parameters outside ``reached``, to ``[S]``, zero there as well.

        Args:
            stays: whether it is a micro-batch that waits for a later one.
        """
        self.stays, plan = stays, self.reducer.plan
        if plan.info.flat is not None:
            out = torch.full((plan.buffer_columns,), torch.nan)
            self.reducer.reduce(out, buffer.flatten(), world(), SUM)
            return out
        missing = missing_mask(plan, reached)
        names = reached if missing.any() else None
        out = torch.full((int((~missing).sum()),), torch.nan)
        if plan.for_all:
            out = buffer[0, ~missing].clone()
            average = ReplicaAverage(self.reducer, world(), lambda: not stays, lambda: names)
            average(out, SUM)
            for other in gathered(out):
                torch.testing.assert_close(other, out, equal_nan=True, **EXACT)
        else:
            self.reducer.reduce(out, buffer[:, ~missing].flatten(), world(), SUM, reached=names)
        found = torch.zeros(plan.columns)
        found[~missing] = out
        return found


@contextmanager
def backwards(
    route: str, rank: int, world_size: int, codec: dict[str, Any], feedback: dict[str, Any]
) -> Iterator[list[Backward]]:
    """One of every unit."""
    route = route.split()[0]
    if route == "FSDP1":
        # A segment of everything is FSDP1's own buffer; of some parameters it is rearranged.
        names = ["*"] if world_size == 4 else ["second.*.weight", "first.*", "head.weight"]
        rule = {"when": {"name": names}, "codec": codec, "feedback": feedback}
        model = wrap(sharded(), {"schema": 1, "gradients": [rule]})
        yield [Backward(r) for r in tagc.compressor(model).reducers if r.plan.compressed]
        return
    plan = matrix_plan(
        world_size, codec, feedback, direction="replicas" if route == "replicas" else "gradients"
    )
    if route not in ("hosts", "inside"):
        yield [Backward(unit_reducer(plan))]
        return
    form = "int8" if route == "inside" else "native"
    on_hosts = in_two_levels(plan, codec, feedback, inside=form)
    backward: Backward
    with host_reducer(rank, on_hosts, crosses=lambda: not backward.stays) as reducer:
        backward = Backward(reducer)
        yield [backward]


def case(route: str, *how: str) -> tuple[Any, ...]:
    """The number of ranks comes with the route."""
    return int(route.split()[1]), route, *how


# FSDP1 cuts matrices anywhere, and replicas have no owner who chooses a support.
QUICK = [
    case("replicas 3", "quantized 8", "float32", "grid"),
    case("hosts 4", "sketch int8x4", "bfloat16", "normal"),
    case("FSDP1 3", "quantized 4", "float32", "grid"),
    case("flat 2", "shared int32x1", "float32", "grid"),
    case("flat 3", "matrix 1", "lead", "normal"),
    case("replicas 2", "sketch warm", "lead", "grid"),
]
RARE = [
    case("flat 3", "sketch int16x2", "lead", "grid"),
    case("hosts 4", "shared int8x4", "float32", "grid"),
    case("hosts 4", "matrix warm", "lead", "normal"),
    case("replicas 4", "sketch int32x1", "float32", "grid"),
    case("replicas 4", "matrix 1", "bfloat16", "normal"),
    case("replicas 3", "matrix 2", "lead", "grid"),
    case("FSDP1 4", "sketch int8x4", "lead", "grid"),
    case("FSDP1 4", "shared int8x4", "bfloat16", "normal"),
]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "route", "codec", "feedback", "numbers"),
    [*QUICK, *(slow(*rare) for rare in RARE)],
)
def test_nothing_is_lost(
    rank: int, world_size: int, route: str, codec: str, feedback: str, numbers: str
) -> None:
    """To the bit on a grid, where nothing but a matrix's codes, narrow residuals and leads round.
    In random order: backwards that reach all of a unit or a part, micro-batches that wait."""
    made = backwards(route, rank, world_size, CODECS[codec], FEEDBACKS[feedback])
    with made as units:
        for backward in units:
            plan = backward.reducer.plan
            averages = plan.shots is not None
            accounts = Accounts(
                backward.reducer,
                exact=(
                    numbers == "grid"
                    and feedback == "float32"
                    and "matrix" not in codec
                    and not (averages and world_size == 3)
                ),
                overshoot=2 if "matrix" in codec else 1,
                owner_unit=world_size if averages else 1,
            )
            conserves(backward, accounts, rank, NUMBERS[numbers])


def conserves(backward: Backward, accounts: Accounts, rank: int, draw: Callable) -> None:
    reducer, plan, random_ = accounts.reducer, accounts.reducer.plan, random.Random(1)
    W, names = dist.get_world_size(), [param.name for param in plan.info.params]
    waits = plan.for_all or plan.info.ranks_per_host > 1
    for step in range(STEPS):
        buffers = draw(W, plan.buffer_columns, step)[:, : 1 if plan.for_all else W].clone()
        reached = set(names)
        if plan.info.flat is not None:
            buffers[:, ~planned(plan)] = 0
        elif step % 4:
            reached = set(random_.sample(names, random_.randrange(1, len(names))))
        missing = torch.zeros(plan.buffer_columns, dtype=torch.bool)
        if len(reached) < len(names):
            missing = missing_mask(plan, reached)
        buffers[:, :, missing] = 0
        before = accounts.owed()
        stays = waits and random_.random() < 0.4
        out = backward(buffers[rank], reached, stays=stays)
        assert not (stays and out.any())
        accounts.enter(buffers, out)
        torch.testing.assert_close(accounts.owed()[missing], before[missing], **EXACT)
    zeros = torch.zeros(W, 1 if plan.for_all else W, plan.buffer_columns)
    accounts.enter(zeros, backward(zeros[rank], set(names), stays=False))
    assert not reducer.waiting
    assert gathered(accounts.owed()).any()
    assert all(count.unresolved == 0 for count in reducer.selection_counts())


@on_ranks()
@pytest.mark.parametrize("bad", [math.nan, slow(math.inf)])
@pytest.mark.parametrize(
    ("world_size", "route", "codec", "feedback"),
    [
        *(case[:4] for case in QUICK if "FSDP1" not in case[1] and "warm" not in case[2]),
        case("inside 4", "quantized 4", "float32"),
    ],
)
def test_what_is_not_finite_shows_once(
    rank: int, world_size: int, route: str, codec: str, feedback: str, bad: float
) -> None:
    """In its segment, at the owner of its shard, or in all replicas, in the same step; and it is
    never owed. Also in the first step, in which thresholds are sampled."""
    made = backwards(route, rank, world_size, CODECS[codec], FEEDBACKS[feedback])
    with made as (backward,):
        reducer, plan = backward.reducer, backward.reducer.plan
        names, owner = {param.name for param in plan.info.params}, world_size - 1
        for step in range(4):
            buffers = normal(world_size, plan.columns, step)[:, : 1 if plan.for_all else None]
            hit = plan.segments[step % len(plan.segments)] if step % 2 == 0 else None
            if hit is not None:
                buffers[0, 0 if plan.for_all else owner, hit.start + 4] = bad
            out = backward(buffers[rank], names, stays=False)
            for segment in plan.segments:
                finite = bool(out[segment.start : segment.stop].isfinite().all())
                assert finite != (segment is hit and (plan.for_all or rank == owner)), segment
            if hit is not None and (plan.for_all or rank == owner):
                assert not out[hit.start + 4].isfinite()
            kept = (reducer.residuals, reducer.owner_residuals, reducer.owner_states)
            assert all(t.isfinite().all() for stored in kept for t in stored.values())
            if reducer.programs.sketches is not None:
                assert sketch_of(reducer).threshold.isfinite().all()


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "route", "codec"),
    [
        case("flat 3", "shared int32x1"),
        case("hosts 4", "sketch int16x2"),
        case("replicas 4", "matrix 1"),
    ],
)
def test_bytes_are_what_the_plan_says(rank: int, world_size: int, route: str, codec: str) -> None:
    with backwards(route, rank, world_size, CODECS[codec], {"kind": "residual"}) as (backward,):
        reducer, plan = backward.reducer, backward.reducer.plan
        for step in range(3):
            buffers = normal(world_size, plan.columns, step)[rank, : 1 if plan.for_all else None]
            backward(buffers, {param.name for param in plan.info.params}, stays=False)
        # Sketches agree once on their first thresholds: a float for each segment and destination.
        peers, made = plan.peers, plan.messages.made
        sketched = [s for s in plan.segments if isinstance(s.codec, SketchPlan)]
        once = 4 * (peers - 1) * made * len(sketched)
        assert reducer.wire_bytes == once + 3 * sum(bytes_in_step(plan))
        sent = zip(plan.segments, bytes_in_step(plan), strict=True)
        compressed = 3 * sum(n for s, n in sent if s.compressed)
        assert reducer.compressed_wire_bytes == once + compressed
        assert reducer.counters.inside_bytes == 3 * bytes_inside(plan)
