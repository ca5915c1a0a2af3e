"""`codec: auto` on several ranks: what is chosen, that all choose it, and what it does then."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tagc
from support.distributed import on_ranks, run_ranks
from tagc.collect import Transport, gather_merged, transport
from tagc.costs import auto, speed
from tagc.costs.link import Link
from tagc.costs.speed import Speed
from tagc.handle import wrapper
from tagc.plan import UnitInfo, UnitParam, build_plan
from tagc.policy import Policy

SLOW = Link(bandwidth=1e6, latency=1e-4)
FAST = Link(bandwidth=1e12, latency=1e-6)
# Seconds per element; a gigabyte per second and codec.
SPEED = Speed(encode=1e-9, decode=1e-9)


def policy(min_bits: int = 4, **rest: Any) -> dict:
    rule = {"when": {"role": ["mlp", "attention"]}, "codec": {"kind": "auto", "min_bits": min_bits}}
    return {"schema": 1, "gradients": [rule], **rest}


def block() -> nn.Module:
    parts = {"up_proj": nn.Linear(64, 320), "act": nn.ReLU(), "down_proj": nn.Linear(320, 64)}
    return nn.Sequential(OrderedDict(parts))


def sharded(**options: Any) -> Any:
    torch.manual_seed(1)
    model: Any = nn.Sequential(OrderedDict(layers=nn.Sequential(block(), block())))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def grads(model: Any, rank: int) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    model(x).square().sum().backward()
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


@contextmanager
def measuring(link: Link, measured: Speed = SPEED) -> Iterator[None]:
    """What this rank measures."""

    with (
        patch.object(auto, "measure_link", lambda group, device: link),
        patch.object(speed, "measure_speed", lambda *_: measured),
    ):
        yield


def wrapped(link: Link, speed: Speed = SPEED, chosen: Any = None) -> Any:
    with measuring(link, speed):
        return tagc.wrap(sharded(), chosen or policy(), ops="reference")


def codecs(model: Any) -> dict[str, str]:
    return {row.param: row.codec for row in tagc.compressor(model).plan().rows}


@on_ranks(4)
def test_hosts_have_links_of_their_own(rank: int, world_size: int) -> None:
    """Slow between hosts: their ranks share a copy, and send changes of parameters."""
    rule = {"when": {"role": "mlp"}, "codec": {"kind": "auto", "memory": 1.0}}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mp_policy=mixed)

    def measured(group: Any, device: Any) -> Link:
        first, second, *_ = dist.get_process_group_ranks(group)
        return FAST if second == first + 1 and group.size() == 2 else SLOW

    with measuring(SLOW), patch.object(auto, "measure_link", measured):
        tagc.wrap(model, policy(parameters=[rule]), ops="reference", hosts=2)
    rows = [r for r in tagc.compressor(model).plan().rows if r.direction == "parameters"]
    found = {r.param: r.codec for r in rows}
    assert found["layers.0.up_proj.weight"] == "delta quantized int4"
    assert found["layers.0.up_proj.bias"] == "dense"
    # Ranks of other groups learn the slowest link, too.
    rows_of_grid: Any = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns: Any = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = [rows_of_grid[rank // 2], columns[rank % 2]]
    assert gather_merged(groups, {"": rank}, max) == {"": 3}


@pytest.mark.parametrize(
    ("memory", "hosts", "expected"),
    [(0.9, 2, "quantized int8"), (1.5, 1, "quantized int8 kept")],
)
def test_memory_that_may_be_spent_on_parameters(memory: float, hosts: int, expected: str) -> None:
    """A copy in bfloat16 takes 2 bytes, divided by the ranks on a host; a kept message 1.01."""
    rule = {"when": {"role": "mlp"}, "codec": {"kind": "auto", "memory": memory}}
    plan = tagc.explain(
        {"layers.0.mlp.w": (512, 512)}, policy(parameters=[rule]), world_size=4,
        ranks_per_host=hosts, parameter_dtype=torch.bfloat16, link=SLOW,
    )  # fmt: skip
    assert plan.parameters[0].segments[0].codec.name == expected


@on_ranks(2)
def test_auto_is_the_policy_without_a_word(rank: int, world_size: int) -> None:
    with measuring(SLOW), patch.object(wrapper, "say") as say:
        tagc.wrap(sharded(), ops="reference")
    # It says what it chose. In float32, a copy would take 4 bytes, and a kept message 1.01.
    lines = [call.args[0] for call in say.call_args_list]
    assert len(lines) == (rank == 0)
    chose = "policy 'auto' chose quantized int4 for gradients, quantized int8 for parameters "
    assert all(line.startswith(chose) for line in lines)


@on_ranks(2)
def test_a_fast_link_stays_native_and_says_why(rank: int, world_size: int) -> None:
    model, native = wrapped(FAST), sharded()
    torch.testing.assert_close(grads(model, rank), grads(native, rank), rtol=0, atol=0)
    plan = tagc.compressor(model).plan()
    assert not any(unit.compressed for unit in plan.all_units)
    assert sum(row.stored_bytes for row in plan.rows) == 0
    assert "- gradients of layers.0, layers.1: dense, out of dense " in str(plan)


def _choose_on_ranks(rank: int, links: list[Link], speeds: list[Speed]) -> tuple[Any, ...]:
    model = wrapped(links[rank], speeds[rank])
    plan = tagc.compressor(model).plan()
    grads(model, rank)  # a rank that chose differently hangs here
    return plan.fingerprint, plan.notes, codecs(model)["layers.0.up_proj.weight"]


SLOW_CODEC = Speed(encode=1e-3, decode=1e-3)


@pytest.mark.parametrize(
    ("links", "speeds", "chosen"),
    [
        ([FAST, SLOW], [SPEED, SPEED], "quantized int4"),
        ([SLOW, SLOW], [SPEED, SLOW_CODEC], "dense"),
    ],
)
def test_all_choose_by_the_slowest(links: list[Link], speeds: list[Speed], chosen: str) -> None:
    lines = run_ranks(_choose_on_ranks, 2, links, speeds)
    assert lines[0] == lines[1]
    assert lines[0][2] == chosen


@on_ranks(2)
def test_a_failure_on_one_rank_reaches_the_other(rank: int, world_size: int) -> None:
    def fail(*args: Any) -> Any:
        raise MemoryError("no room")

    original = speed.measure_speed
    with (
        patch.object(speed, "measure_speed", fail if rank else original),
        pytest.raises(RuntimeError if rank == 0 else MemoryError, match="no room"),
    ):
        tagc.wrap(sharded(), policy(), ops="reference")


@on_ranks(3)
def test_the_link_by_the_clock(rank: int, world_size: int) -> None:
    """With collectives of 1 ms and 10 ns a byte, 30 in a reduce-scatter, 20 in an all-gather."""
    now = [0.0]
    others = (world_size - 1) / world_size

    def taking(per_byte: float, buffer: int) -> Any:
        def collective(*tensors: torch.Tensor, **_: Any) -> Any:
            now[0] += 1e-3 + per_byte * 4 * tensors[buffer].numel() * others
            return SimpleNamespace(wait=lambda: None)

        return collective

    group = dist.group.WORLD
    assert group is not None
    with (
        patch.object(time, "perf_counter", lambda: now[0]),
        patch.object(Transport, "all_to_all", lambda self, out, inp: taking(1e-8, 0)(inp)),
        patch.object(transport, "reduce_scatter", taking(3e-8, 1)),
        patch.object(transport, "all_gather", taking(2e-8, 0)),
    ):
        link = auto.measure_link(group, torch.device("cpu"))
    small = 4 * (world_size - 1) * 1e-8
    assert abs(link.latency - 1e-3) <= 1.01 * small
    assert abs(link.bandwidth - 1e8) < 1e6
    assert abs(link.reduce_scatter - 3) < 0.01
    assert abs(link.all_gather - 2) < 0.01
    assert now[0] < 1.0  # it is done soon


# Without ranks


def unit() -> UnitInfo:
    def param(name: str) -> UnitParam:
        return UnitParam(name=f"layers.0.{name}.weight", shape=(512, 512), columns=512 * 256)

    return UnitInfo(
        name="layers.0",
        params=(param("up_proj"), param("q_proj")),
        world_size=2,
        dtype=torch.float32,
    )


def codecs_chosen(link: Link, *rules: dict, time: float = 0.0) -> list[str]:
    """The codec of each segment."""
    loaded = Policy.load({"schema": 1, "gradients": list(rules)})
    choose = auto.FastestChoice(lambda *_: link, lambda coding, segment: time)
    (plan,) = build_plan([unit()], loaded, choose=choose).units
    return [s.codec.name for s in plan.segments]


def test_a_unit_is_chosen_as_a_whole() -> None:
    """Each segment has its own bound, and both leave the native path together."""
    rules = [
        {"when": {"role": role}, "codec": {"kind": "auto", "min_bits": bits}}
        for role, bits in (("mlp", 4), ("attention", 16))
    ]
    slow, fast = (codecs_chosen(link, *rules, time=1e-5) for link in (SLOW, FAST))
    assert slow == ["quantized int4", "dense bfloat16"]
    assert fast == ["dense", "dense"]


@pytest.mark.parametrize(
    ("latency", "codec"), [(0.0, "quantized int4"), (0.3e-3, "quantized int8"), (1.0, "dense")]
)
def test_a_small_saving_is_not_worth_it(latency: float, codec: str) -> None:
    """4 bits save half of the seconds of 8, until the latency makes that less than 30%. (262144
    columns go to the other rank: 1.05, 0.52, 0.26 and 0.13 ms on the link.)"""
    link = Link(bandwidth=1e9, latency=latency)
    assert {*codecs_chosen(link, {"when": {}, "codec": {"kind": "auto"}})} == {codec}


def test_what_nothing_is_owed_of_is_rounded_by_chance() -> None:
    made = policy()
    made["gradients"][0]["feedback"] = {"kind": "none"}
    found = codecs_chosen(SLOW, *made["gradients"])
    assert "quantized int4 dithered" in found


def _resumed(rank: int, folder: str) -> None:
    model = wrapped(SLOW, chosen="auto")
    first = tagc.compressor(model)
    grads(model, rank)
    first.save(folder)
    if rank == 0:
        first.plan().freeze(f"{folder}/chosen.yaml")
    dist.barrier()
    model.zero_grad()
    expected = grads(model, rank)

    again = wrapped(FAST, chosen=f"{folder}/chosen.yaml")  # which would choose dense
    handle = tagc.compressor(again)
    assert handle.plan().fingerprint == first.plan().fingerprint
    handle.load(folder)
    torch.testing.assert_close(grads(again, rank), expected, rtol=0, atol=0)
    other = tagc.compressor(wrapped(FAST, chosen="auto"))
    with pytest.raises(tagc.StateError, match=r"chose differently .* plan\(\).freeze\(file\)"):
        other.load(folder)


def test_a_choice_can_be_kept(tmp_path: Path) -> None:
    """The policy's file of a choice makes the same plan, whatever the link is by then, and
    continues the run that chose."""
    run_ranks(_resumed, 2, str(tmp_path))


def test_units_that_chose_differently_are_named(tmp_path: Path) -> None:
    """Brackets in a name are no glob; a policy that chooses nothing has nothing to keep."""
    shapes = {f"layers.{i}.mlp.w[{i}]": (64 + 2**12 * i, 512) for i in range(2)}
    link = Link(bandwidth=1e9, latency=1e-4)
    plan = tagc.explain(shapes, policy(), world_size=4, link=link)
    assert len({row.codec for row in plan.rows}) == 2
    plan.freeze(tmp_path / "chosen.yaml")
    kept = tagc.explain(shapes, tmp_path / "chosen.yaml", world_size=4)
    codecs = [{(row.param, row.codec, row.wire_bytes) for row in p.rows} for p in (plan, kept)]
    assert codecs[0] == codecs[1]
    assert "plan().freeze(" in str(plan)
    with pytest.raises(ValueError, match="'hybrid' has nothing to freeze: it has no codec auto"):
        tagc.explain(shapes, "hybrid", world_size=4).freeze(tmp_path / "none.yaml")


def test_a_choice_beside_messages_of_varying_sizes_can_be_kept(tmp_path: Path) -> None:
    """Those keep no message for a backward, and the file of the choice says so."""
    exact = {"when": {"role": "attention"}, "codec": {"kind": "exact", "keep_copy": False}}
    auto = {"when": {}, "codec": {"kind": "auto", "memory": 1.2, "min_bits": 8}}
    rules = {"gradients": [{"when": {}, "codec": {"kind": "dense"}}], "parameters": [exact, auto]}
    shapes = {"layers.0.wq.weight": (512, 512), "layers.0.mlp.w1.weight": (4096, 512)}
    how: Any = {"world_size": 4, "parameter_dtype": torch.bfloat16}
    link = Link(bandwidth=1e6, latency=1e-4)
    plan = tagc.explain(shapes, {"schema": 1, **rules}, link=link, **how)
    assert "keep_for_backward: false" in plan.frozen
    plan.freeze(tmp_path / "chosen.yaml")
    kept = tagc.explain(shapes, tmp_path / "chosen.yaml", **how)
    assert kept.parameters == plan.parameters
