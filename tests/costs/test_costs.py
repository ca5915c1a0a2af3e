"""Bytes and seconds of a unit against numbers worked out by hand, and of every shipped policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tagc
from support.marks import slow
from tagc.costs import speed
from tagc.costs.candidates import Advisor, Question
from tagc.costs.link import GLOO_REDUCE_SCATTER, Link, StepCost, Traffic, traffic, unit_seconds
from tagc.costs.shapes import synthetic
from tagc.costs.speed import (
    Speed,
    codec_seconds,
    measured_time,
    memory_time,
    no_time,
    speed_key,
    timed_when_asked,
)
from tagc.ops import get_ops
from tagc.plan import (
    UnitInfo,
    UnitParam,
    UnitPlan,
    build_plan,
    bytes_in_step,
    bytes_inside,
)
from tagc.policy import Policy, data_parallel_policies

COLUMNS = 65536
DENSE_BYTES = 4 * COLUMNS
# 256 blocks of 256: a word for two scales, 32 words of 4-bit codes each, and a stamp at a multiple
# of 32 words.
INT4_WORDS = 128 + 256 * 32
INT8_WORDS = 128 + 256 * 64
INT4_MESSAGE = 4 * (INT4_WORDS + 32)
INT8_MESSAGE = 4 * (INT8_WORDS + 32)
# Of two shots: three quarters of a message to owners, and as much of the sum to all.
SHOT = 3 * 4 * (INT4_WORDS / 4 + 32)
DENSE = {"kind": "dense"}
INT4 = {"kind": "quantized", "bits": 4}
INT8 = {"kind": "quantized", "bits": 8, "keep_for_backward": False}
KEPT = INT8 | {"keep_for_backward": True}
DELTA = {"kind": "delta", "bits": 4}
SKETCH = {"kind": "sketch", "density": 0.01}


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
    inside: str = "native",
    **rest: Any,
) -> UnitPlan:
    if direction == "parameters":
        rest = {"per_step": 2} | rest
    unit = info(world_size, **rest)
    rules = {"gradients": [{"when": {}, "codec": DENSE}]}
    rules |= {direction: [{"when": {"role": "mlp"}, "codec": codec}]}
    policy = Policy.load({"schema": 1, "inside": inside, **rules})
    built = build_plan([unit], policy, gathers=[unit], replicas=[unit], gloo=gloo)
    (found,) = built.units if direction == "gradients" else getattr(built, direction)
    return found


HOSTS: dict[str, Any] = {"ranks_per_host": 2}
PARAMETERS: dict[str, Any] = {"direction": "parameters"}
REPLICAS: dict[str, Any] = {"direction": "replicas"}


def sends(collectives: int, **ways: float) -> dict[str, float]:
    return {"collectives": collectives, **ways}


NATIVE = sends(1, reduced=3 * DENSE_BYTES)
# Half of the buffer to the neighbour, in every backward; then to the other host.
INSIDE, ON_HOSTS = sends(1, inside=2 * DENSE_BYTES), sends(2, inside=2 * DENSE_BYTES)
EVERY: dict[str, float] = {}  # the same again

# Options of the plan. Its traffic with one backward, and what each further one adds, if not the
# same. Rows that are encoded and decoded with one backward, and in each further one.
NONE: dict[str, float] = {}
IDLE = (0, 0), (0, 0)

# fmt: off
CASES: list[tuple[dict, dict, dict, tuple[tuple, tuple]]] = [
    ({"codec": DENSE}, NATIVE, EVERY, IDLE),
    # NCCL sends an uncompressed unit in one level.
    ({"codec": DENSE, "gloo": False, **HOSTS}, NATIVE, EVERY, IDLE),
    ({"codec": DENSE, **HOSTS}, ON_HOSTS | {"across": DENSE_BYTES}, INSIDE, IDLE),
    ({"codec": DENSE, **REPLICAS}, sends(1, ring=2 * 3 / 4 * DENSE_BYTES), NONE, IDLE),
    ({"codec": INT4, "world_size": 1}, NONE, EVERY, IDLE),
    ({"codec": INT4}, sends(1, all_to_all=3 * INT4_MESSAGE), EVERY, ((4, 4), (4, 4))),
    ({"codec": INT4, **HOSTS}, ON_HOSTS | {"across": INT4_MESSAGE}, INSIDE, ((2, 2), (0, 0))),
    # Rows for four ranks are encoded inside, too.
    ({"codec": INT4, "inside": "int8", **HOSTS},
     sends(2, inside=2 * INT8_MESSAGE, across=INT4_MESSAGE), sends(1, inside=2 * INT8_MESSAGE),
     ((4 + 2, 4 + 2), (4, 4))),
    ({"codec": INT4, "world_size": 2, **REPLICAS}, sends(1, ring=INT4_MESSAGE), NONE,
     ((1, 2), (0, 0))),
    # A quarter is encoded once more; a quarter of each message is decoded, and every owner's.
    ({"codec": INT4, **REPLICAS}, sends(2, all_to_all=SHOT, ring=SHOT), NONE, ((1.25, 2), (0, 0))),
    ({"codec": DENSE, **PARAMETERS}, sends(2, gathered=2 * 3 * DENSE_BYTES), EVERY, IDLE),
    ({"codec": DENSE, **PARAMETERS, **HOSTS},
     sends(4, across=2 * DENSE_BYTES, inside=2 * 2 * DENSE_BYTES), EVERY, IDLE),
    ({"codec": INT8, **PARAMETERS}, sends(2, ring=2 * 3 * INT8_MESSAGE), EVERY, ((2, 8), (2, 8))),
    ({"codec": KEPT, **PARAMETERS}, sends(1, ring=3 * INT8_MESSAGE), EVERY, ((1, 8), (1, 8))),
    ({"codec": KEPT, **PARAMETERS, **HOSTS},
     sends(2, across=INT8_MESSAGE, inside=2 * INT8_MESSAGE), EVERY, ((1, 8), (1, 8))),
    # Changes go once in a step; hosts read their copy in every gather.
    ({"codec": DELTA, **PARAMETERS, **HOSTS},
     sends(3, across=INT4_MESSAGE, inside=2 * 2 * DENSE_BYTES),
     sends(2, inside=2 * 2 * DENSE_BYTES), ((1, 2), (0, 0))),
]
# fmt: on


@pytest.mark.parametrize(("options", "first", "more", "coded"), CASES, ids=str)
def test_bytes_and_seconds_of_a_step(
    options: dict, first: dict, more: dict, coded: tuple[tuple, tuple]
) -> None:
    unit = plan(**options)
    each = Traffic(**(first if more is EVERY else more))
    # An encoded element takes a second, a decoded one 100.
    names = {speed_key(s.codec) for found in unit.flights.values() for s in found.segments}
    time = measured_time({name: Speed(encode=1.0, decode=100.0) for name in names})
    for batches in (1, 3):
        expected = sum([each] * (batches - 1), Traffic(**first))
        assert traffic(unit, batches) == expected
        sent = expected.reduced + expected.gathered + expected.ring + expected.all_to_all
        assert sum(bytes_in_step(unit, batches)) == sent + expected.across
        encoded, decoded = (a + (batches - 1) * b for a, b in zip(*coded, strict=True))
        assert codec_seconds(unit, time, batches) == COLUMNS * (encoded + 100 * decoded)
    assert bytes_inside(unit) == first.get("inside", 0)


def test_sketches_also_send_cells_and_counts() -> None:
    for options, starts in ((REPLICAS, 3), (HOSTS, 4)):
        unit = plan(SKETCH, **options)
        sent = traffic(unit)
        assert sent.collectives == starts
        total = sent.ring + sent.all_to_all + sent.across
        assert total == pytest.approx(sum(bytes_in_step(unit)))
    # Cells are decoded once, as a sum.
    (key,) = {speed_key(s.codec) for s in unit.segments}
    seconds = codec_seconds(unit, measured_time({key: Speed(encode=1.0, decode=100.0)}))
    assert seconds == COLUMNS * (unit.messages.made + 100)
    with pytest.raises(ValueError, match="no speed was measured for 'quantized int4 with float32"):
        codec_seconds(plan(INT4), measured_time({key: Speed(encode=1.0, decode=1.0)}))


@pytest.mark.parametrize(
    ("options", "bytes_"),
    [
        # Gradients read, residuals read and written, messages written; these read, a row written.
        ({"codec": INT4}, 4 * COLUMNS * (4 + 4 + 4) + 2 * 4 * 4 * INT4_WORDS + 4 * COLUMNS),
        # Encoded once, decoded twice.
        (
            {"codec": KEPT, **PARAMETERS, "dtype": torch.bfloat16},
            2 * COLUMNS + 4 * INT8_WORDS + 2 * (4 * 4 * INT8_WORDS + 4 * 2 * COLUMNS),
        ),
    ],
)
def test_the_least_that_codecs_move(options: dict, bytes_: float) -> None:
    assert codec_seconds(plan(**options), memory_time(1e9)) == pytest.approx(bytes_ / 1e9)


def test_a_link() -> None:
    """16 ranks on 2 hosts: each of 8 sends 8 of its 15 messages over the link; a ring crosses it
    once; between hosts all ranks send."""
    sent = Traffic(collectives=2, reduced=100.0, ring=10.0, all_to_all=15.0, gathered=20.0)
    assert Link(bandwidth=1.0).carried(sent, 16) == 145
    link = Link(bandwidth=10.0, ranks_per_host=8, latency=7.0)
    assert link.carried(sent, 16) == pytest.approx(130 + 8 * 8)
    assert link.seconds(sent, 16) == pytest.approx(14 + (130 + 64) / 10)
    levels = Traffic(across=5.0, inside=3.0)
    link = Link(bandwidth=1.0, inside=10.0, ranks_per_host=2)
    assert link.carried(levels, 4) == 10
    assert link.seconds(levels, 4) == pytest.approx(10 + 0.3)
    # gloo's own reduce-scatter sends twice as much; its all-gather takes longer, and sends no more.
    gloo = Link(bandwidth=1.0, reduce_scatter=GLOO_REDUCE_SCATTER, all_gather=1.5)
    assert gloo.carried(sent, 16) == 245
    assert gloo.seconds(sent, 16) == 245 + 10
    unit = plan(DENSE)
    assert unit_seconds(unit, Link(bandwidth=1e9, latency=1e-3), no_time) == pytest.approx(
        1e-3 + 3 * DENSE_BYTES / 1e9
    )


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
    slow, fast = Link(bandwidth=1e3), Link(bandwidth=1e15)
    shapes = synthetic(10**6)
    advisor = Advisor(
        Question(shapes=shapes, world_size=8, replicas=2, link=slow, shard_link=fast), []
    )
    cost = advisor.cost(advisor.candidates[0])
    # Two replicas exchange their shards, a quarter of the model.
    assert cost.link == pytest.approx(4 * shapes.numel / 4 / 1e3, rel=1e-2)
    (native,) = build_plan([info()], Policy.load("dense"), gathers=[info(per_step=2)]).native
    assert traffic(native) == Traffic(collectives=2, gathered=2 * 3 * DENSE_BYTES)


def test_one_level_has_whole_parameters() -> None:
    """With DDP, and not the part of a host; tensor parallelism leaves a rank half of one."""
    whole = plan(DENSE, gloo=False, ranks_per_host=2, replicated=True)
    assert (whole.columns, whole.rows) == (4 * COLUMNS, 1)
    param = UnitParam(name="weight", shape=(8, 6), local=(4, 6), columns=12)
    unit = replace(info(4, ranks_per_host=2, replicated=True), params=(param,))
    assert unit.in_one_level().params[0].columns == 24


WRAPPED = [name for name in tagc.policies() if tagc.Policy.load(name).sites is None]


def test_every_codec_of_the_shipped_policies_has_a_speed() -> None:
    """Whatever a plan holds can be measured; also exact parameters without a copy."""
    packed = {
        "schema": 1,
        "gradients": [{"when": {}, "codec": {"kind": "dense"}}],
        "parameters": [{"when": {}, "codec": {"kind": "exact", "keep_copy": False}}],
    }
    policies = [*map(tagc.Policy.load, WRAPPED), tagc.Policy.load(packed)]
    link, shapes = Link(bandwidth=1e3), {p.name: p.shape for p in synthetic(1_000_000).params}
    timed: dict[str, Speed] = {}
    time = timed_when_asked(timed, get_ops("cpu", "reference"), torch.device("cpu"))
    with patch.dict(speed._ELEMENTS, {"cpu": 1 << 12}), patch.object(speed, "_REPEATS", 1):
        for policy in policies:
            plan = tagc.explain(
                shapes, policy, world_size=2, link=link, parameter_dtype=torch.bfloat16
            )
            for unit in plan.all_units:
                codec_seconds(unit, time)
    assert len(timed) > 10
    assert all(found.encode > 0 and found.decode > 0 for found in timed.values())


SENDS = [name for name in data_parallel_policies() if name != "dense"]


@pytest.mark.parametrize(
    ("numel", "ranks", "per_host"),
    [(3 * 10**8, 512, 8), *(slow(7 * 10**9, *at) for at in ((2, 1), (512, 1), (16, 8), (512, 8)))],
)
def test_every_policy_sends_less_than_dense_bf16(numel: int, ranks: int, per_host: int) -> None:
    """Bytes of a step that leave a host: parameters gathered in bf16, fp32 gradients."""
    link = Link(bandwidth=1.25e9, ranks_per_host=per_host)
    shapes = synthetic(numel)
    question = Question(shapes=shapes, world_size=ranks, ranks_per_host=per_host, link=link)
    advisor = Advisor(question, [Policy.load(name) for name in SENDS])
    assert not advisor.refused
    sent = {c.name: advisor.cost(c).wire_bytes for c in advisor.candidates}
    assert {*SENDS} <= sent.keys()
    for name in SENDS:
        assert sent[name] < 0.95 * sent["dense bf16"], name
