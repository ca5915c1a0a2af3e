"""Cost formulas against numbers worked out by hand, and against what really is sent."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from support.distributed import on_ranks
from support.units import unit_plan, unit_reducer
from tagc.collect import Transport
from tagc.costs import (
    Link,
    Speed,
    StepCost,
    Traffic,
    measured_time,
    memory_time,
    no_time,
    speed_key,
    step_cost,
    traffic,
    unit_seconds,
    workload,
)
from tagc.costs.codec_time import codec_seconds
from tagc.costs.link import GLOO_REDUCE_SCATTER
from tagc.plan import UnitInfo, UnitParam, UnitPlan, build_plan, native_units
from tagc.plan.inside import plan_inside
from tagc.policy import Policy

COLUMNS = 65536
# 256 blocks of 256: a word for two scales, 32 words of 4-bit codes each.
INT4_WORDS = 128 + 256 * 32
INT8_WORDS = 128 + 256 * 64
# A message ends with a stamp, at a multiple of 32 words.
INT4_MESSAGE = INT4_WORDS + 32
INT8_MESSAGE = INT8_WORDS + 32


def info(world_size: int = 4, **rest: Any) -> UnitInfo:
    shape = (world_size * 256, 256)
    param = UnitParam(name="layers.0.up_proj.weight", shape=shape, columns=COLUMNS)
    rest = {"dtype": torch.float32} | rest
    return UnitInfo(name="layers.0", params=(param,), world_size=world_size, **rest)


def plan(
    codec: dict,
    world_size: int = 4,
    direction: str = "gradients",
    *,
    gloo: bool = True,
    **rest: Any,
) -> UnitPlan:
    unit = info(world_size, **rest)
    dense = [{"when": {}, "codec": {"kind": "dense"}}]
    rules = {"gradients": dense, direction: [{"when": {"role": "mlp"}, "codec": codec}]}
    policy = Policy.load({"schema": 1, **rules})
    built = build_plan([unit], policy, gathers=[unit], replicas=[unit], gloo=gloo)
    (found,) = built.units if direction == "gradients" else getattr(built, direction)
    return found


DENSE = {"kind": "dense"}
INT4 = {"kind": "quantized", "bits": 4}
SKETCH = {"kind": "sketch", "density": 0.01}


def test_a_native_unit() -> None:
    unit = plan(DENSE)
    assert traffic(unit) == Traffic(collectives=1, reduced=3 * 4 * COLUMNS)
    link = Link(bandwidth=1e9, latency=1e-3)
    assert unit_seconds(unit, link, no_time) == pytest.approx(1e-3 + 3 * 4 * COLUMNS / 1e9)
    gloo = Link(bandwidth=1e9, latency=1e-3, reduce_scatter=GLOO_REDUCE_SCATTER)
    assert unit_seconds(unit, gloo, no_time) == pytest.approx(1e-3 + 2 * 3 * 4 * COLUMNS / 1e9)


@pytest.mark.parametrize(("keep", "exchanges"), [(True, 1), (False, 2)])
def test_gathers(keep: bool, exchanges: int) -> None:
    codec = {"kind": "quantized", "bits": 8, "keep_for_backward": keep}
    unit = plan(codec, direction="parameters", per_step=2)
    ring = exchanges * 3 * 4 * INT8_MESSAGE
    assert traffic(unit) == Traffic(collectives=exchanges, ring=ring)
    (native,) = native_units([info(per_step=2)], "parameters")
    assert traffic(native) == Traffic(collectives=2, gathered=2 * 3 * 4 * COLUMNS)
    # gloo's own all-gather takes longer, and sends no more.
    gloo = Link(bandwidth=1.0, latency=8.0, all_gather=1.5)
    assert gloo.seconds(traffic(native), 4) == 2 * 8 + 1.5 * 2 * 3 * 4 * COLUMNS
    assert gloo.carried(traffic(native), 4) == 2 * 3 * 4 * COLUMNS
    assert gloo.seconds(traffic(unit), 4) == exchanges * 8 + ring
    # It encodes its own shard once a gather, and decodes all shards twice.
    speeds = {"quantized int8": Speed(encode=1.0, decode=100.0)}
    seconds = codec_seconds(unit, measured_time(speeds))
    assert seconds == exchanges * COLUMNS + 100 * 2 * 4 * COLUMNS


def test_replicas_all_reduce_one_shard() -> None:
    assert traffic(plan(DENSE, direction="replicas")).ring == 2 * 3 / 4 * 4 * COLUMNS
    two_copies = plan(INT4, world_size=2, direction="replicas")
    assert traffic(two_copies) == Traffic(collectives=1, ring=4 * INT4_MESSAGE)
    unit = plan(INT4, direction="replicas")
    # In two shots: three quarters of a message to owners, and as much of the sum to all.
    shot = 3 * 4 * (INT4_WORDS / 4 + 32)
    assert traffic(unit) == Traffic(collectives=2, all_to_all=shot, ring=shot)
    assert traffic(unit, micro_batches=3) == traffic(unit)
    # A quarter is encoded once more; a quarter of each message is decoded, and every owner's.
    speeds = {"quantized int4 with float32 feedback": Speed(encode=1.0, decode=100.0)}
    seconds = codec_seconds(unit, measured_time(speeds))
    assert seconds == 1.25 * COLUMNS + 100 * 2 * COLUMNS
    # What is encoded is read, with a residual, which is written; sums and results are written.
    least = 4 * COLUMNS * (1.25 + 2 * 1.25 + 0.25 + 1) + 4 * INT4_WORDS * (1.25 + 2)
    assert codec_seconds(unit, memory_time(1.0)) == least


@pytest.mark.parametrize("direction", ["gradients", "replicas"])
def test_sketches_take_three_collectives(direction: str) -> None:
    unit = plan(SKETCH, direction=direction)
    sent = traffic(unit)
    assert sent.collectives == 3
    # The plan prints the same bytes.
    total = sent.reduced + sent.ring + sent.all_to_all
    assert total == pytest.approx(sum(unit.wire_bytes(s) for s in unit.segments))


def test_nobody_to_send_to() -> None:
    assert traffic(plan(INT4, world_size=1)) == Traffic()
    assert codec_seconds(plan(INT4, world_size=1), memory_time(1.0)) == 0


@on_ranks(2, 3)
def test_the_formula_is_what_is_sent(rank: int, world_size: int) -> None:
    """Bytes and collectives of a unit with sketched and dense columns, and of a dense one."""
    started: list[str] = []

    def counting(module: Any, name: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            started.append(name)
            return original(*args, **kwargs)

        return patch.object(module, name, call)

    unit = unit_plan(world_size)
    reducer = unit_reducer(unit)
    group = dist.group.WORLD
    assert group is not None

    def reduce(columns: int, reducer: Any) -> tuple[int, int]:
        started.clear()
        before = reducer.wire_bytes
        buffer = torch.randn(world_size * columns)
        reducer.reduce(torch.empty(columns), buffer, group, dist.ReduceOp.AVG)
        return len(started), reducer.wire_bytes - before

    with (
        counting(Transport, "all_to_all"),
        counting(Transport, "reduce_scatter"),
        counting(Transport, "all_reduce"),
    ):
        reduce(unit.columns, reducer)  # the first one also agrees on thresholds
        collectives, sent = reduce(unit.columns, reducer)
        assert collectives == traffic(unit).collectives == 3
        expected = traffic(unit)
        # The counts' bytes are rounded down.
        assert abs(sent - expected.all_to_all - expected.ring - expected.reduced) < 1

        dense = plan(DENSE, world_size)
        assert reduce(COLUMNS, unit_reducer(dense)) == (1, traffic(dense).reduced)


def test_ranks_of_a_host_share_its_link() -> None:
    """16 ranks on 2 hosts: each of 8 sends 8 of its 15 messages over the link; a ring crosses it
    once."""
    link = Link(bandwidth=1.0, ranks_per_host=8)
    sent = Traffic(reduced=100.0, ring=10.0, all_to_all=15.0)
    assert link.carried(sent, 16) == pytest.approx(110 + 64)
    assert link.seconds(sent, 16) == pytest.approx(174)
    assert Link(bandwidth=1.0).carried(sent, 16) == 125


@pytest.mark.parametrize("codec", [DENSE, INT4, SKETCH])
def test_two_levels(codec: dict[str, Any]) -> None:
    """4 ranks on 2 hosts: each sends half of its buffer to its neighbour, one message to the other
    host, and both ranks of a host cross its link."""
    unit = plan(codec, ranks_per_host=2)
    sent = traffic(unit)
    assert sent.inside == unit.inside_bytes == 2 * 4 * COLUMNS
    assert sent.across == pytest.approx(sum(unit.wire_bytes(s) for s in unit.segments))
    assert (sent.reduced, sent.ring, sent.all_to_all) == (0, 0, 0)
    assert sent.collectives == {"dense": 2, "quantized": 2, "sketch": 4}[codec["kind"]]
    link = Link(bandwidth=1.0, inside=10.0, ranks_per_host=2)
    assert link.carried(sent, 4) == 2 * sent.across
    assert link.seconds(sent, 4) == pytest.approx(2 * sent.across + sent.inside / 10)
    assert Link(bandwidth=1.0).seconds(sent, 4) == pytest.approx(sent.across)
    # Rows for two hosts are encoded, not for four ranks.
    if codec is INT4:
        speeds = {
            "quantized int4 with float32 feedback": Speed(encode=1.0, decode=100.0),
        }
        assert codec_seconds(unit, measured_time(speeds)) == 2 * COLUMNS + 100 * 2 * COLUMNS


def test_nccl_sends_a_dense_unit_in_one_level() -> None:
    """As without hosts; with DDP a rank then has all columns, and not a part of its host's."""
    assert traffic(plan(DENSE, gloo=False, ranks_per_host=2)) == traffic(plan(DENSE))
    whole = plan(DENSE, gloo=False, ranks_per_host=2, replicated=True)
    assert (whole.columns, whole.rows) == (4 * COLUMNS, 1)
    # Tensor parallelism leaves this rank half of the parameter.
    param = UnitParam(name="weight", shape=(8, 6), local=(4, 6), columns=12)
    info = UnitInfo(
        name="unit",
        params=(param,),
        world_size=4,
        dtype=torch.float32,
        ranks_per_host=2,
        replicated=True,
    )
    assert info.in_one_level().params[0].columns == 24


def test_what_ranks_of_a_host_send_each_other_is_encoded_too() -> None:
    """In every backward: rows for four ranks, and as many messages decoded."""
    alone = plan(INT4, ranks_per_host=2)
    unit = plan_inside(alone, "int8")
    speeds = {
        "quantized int4 with float32 feedback": Speed(encode=1.0, decode=100.0),
        "quantized int8 dithered": Speed(encode=1e4, decode=1e6),
    }
    time = measured_time(speeds)
    more = codec_seconds(unit, time, 3) - codec_seconds(alone, time, 3)
    assert more == 3 * (4e4 + 4e6) * COLUMNS
    assert traffic(unit, 3).inside == 3 * unit.inside_bytes
    assert unit.inside_bytes < alone.inside_bytes / 3


def test_codec_time_by_speed() -> None:
    unit = plan(INT4)
    (key,) = {speed_key(s.codec) for s in unit.segments}
    assert key == "quantized int4 with float32 feedback"
    seconds = codec_seconds(unit, measured_time({key: Speed(encode=1.0, decode=100.0)}))
    assert seconds == 4 * COLUMNS + 100 * 4 * COLUMNS
    sketch = plan(SKETCH)
    (key,) = {speed_key(s.codec) for s in sketch.segments}
    seconds = codec_seconds(sketch, measured_time({key: Speed(encode=1.0, decode=100.0)}))
    assert seconds == 4 * COLUMNS + 100 * COLUMNS  # decoded once, as a sum
    with pytest.raises(ValueError, match="no speed was measured for 'quantized int4 with float32"):
        codec_seconds(unit, measured_time({key: Speed(encode=1.0, decode=1.0)}))


def test_codec_time_by_memory() -> None:
    """Gradient read, residual read and written, message written; messages read, shard written."""
    moved = 4 * COLUMNS * (4 + 4 + 4) + 4 * 4 * INT4_WORDS + 4 * 4 * INT4_WORDS + 4 * COLUMNS
    assert codec_seconds(plan(INT4), memory_time(1e9)) == pytest.approx(moved / 1e9)
    codec = {"kind": "quantized", "bits": 8, "keep_for_backward": True}
    unit = plan(codec, direction="parameters", per_step=2, dtype=torch.bfloat16)
    encode = 2 * COLUMNS + 4 * INT8_WORDS
    decode = 4 * 4 * INT8_WORDS + 4 * 2 * COLUMNS
    assert codec_seconds(unit, memory_time(1.0)) == pytest.approx(encode + 2 * decode)


@pytest.mark.parametrize(
    ("overlap", "compute", "expected"),
    [
        (0.0, 3.0, 3 + 1 + 2),  # nothing hides
        (1.0, 3.0, 3 + 1),  # all of the link hides
        (1.0, 0.5, 1 + 2),  # no more than the compute lasts
        (0.5, 3.0, 3 + 1 + 1),
    ],
)
def test_the_step(overlap: float, compute: float, expected: float) -> None:
    cost = StepCost(compute=compute, codec=1.0, link=2.0, overlap=overlap, wire_bytes=0)
    assert cost.seconds == pytest.approx(expected)


def test_each_direction_has_a_link() -> None:
    unit = info(per_step=1)
    across = info(2)
    built = build_plan([unit], Policy.load("dense"), replicas=[across])
    work = workload(built, no_time, gathers=[unit])
    slow, fast = Link(bandwidth=1e3), Link(bandwidth=1e15)
    cost = step_cost(work, {"gradients": fast, "parameters": fast, "replicas": slow})
    assert cost.link == pytest.approx(4 * COLUMNS / 1e3, rel=1e-6)
