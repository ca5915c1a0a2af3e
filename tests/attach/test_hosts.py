"""``tagc.wrap(..., hosts=…)``: what a model does with several ranks on a host."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tagc
from support.block_net import wrap
from support.distributed import on_ranks
from support.fsdp1_net import sharded as sharded_by_fsdp1
from support.gathering import gathering, gradients_on_grid
from support.small_net import loss_of, sharded
from support.states import POLICIES, run, wrapped
from tagc.collect import hosts
from tagc.costs import Link, Speed, speed_key
from tagc.costs import auto as auto_costs
from tagc.plan import bytes_in_step, bytes_inside

QUANTIZED = POLICIES["quantized residual"]


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def auto(rank: int, names: str, **options: Any) -> Any:
    """Ranks on hosts with such names."""
    with patch.object(hosts, "host_identity", lambda: names[rank]):
        return wrapped(QUANTIZED, **options)


@on_ranks(4)
def test_hosts_are_found(rank: int, world_size: int) -> None:
    model = auto(rank, "aabb")
    plan = tagc.compressor(model).plan()
    assert {unit.info.ranks_per_host for unit in plan.units} == {2}
    assert "hosts: two levels, 2 hosts of 2 ranks (found by the hosts' names)" in plan.notes
    assert "gradients of 4 units in two levels" in str(plan)
    for reducer in tagc.compressor(model).reducers:
        assert all(residual.shape[0] == 2 for residual in reducer.residuals.values())

    flat = auto(rank, "aaab")
    plan = tagc.compressor(flat).plan()
    assert {unit.info.ranks_per_host for unit in plan.units} == {1}
    why = "hosts have different numbers of ranks: 3, 1"
    assert f"hosts: every rank sends for itself ({why})" in plan.notes
    of_fsdp1 = auto(rank, "aabb", model=sharded_by_fsdp1())
    assert "FSDP1 has no rows for hosts" in str(tagc.compressor(of_fsdp1).plan())
    before = groups()
    with patch.dict("os.environ", TAGC_DISABLE="1"), pytest.warns(UserWarning, match="DISABLE"):
        off = auto(rank, "aabb")
    assert groups() == before
    run(off, rank, range(1))
    assert tagc.compressor(off).wire_bytes == 0


@on_ranks(4)
def test_parameters_come_by_way_of_neighbours(rank: int, world_size: int) -> None:
    """The same bits as without hosts; a third of what goes to all ranks goes to other hosts."""
    for keep in (False, True):
        check_parameters(rank, keep)


def check_parameters(rank: int, keep: bool) -> None:
    codec = {"kind": "quantized", "bits": 8, "block": 32, "keep_for_backward": keep}
    # Some units have nothing compressed.
    policy = gathering(codec, name="first.*.weight")
    with gradients_on_grid():
        flat, on_hosts = wrapped(policy, hosts=None), wrapped(policy, hosts=2)
    mine, theirs = tagc.compressor(on_hosts), tagc.compressor(flat)
    for step in range(2):
        one, other = (loss_of(model, rank, step) for model in (flat, on_hosts))
        assert torch.equal(one, other)
        one.backward()
        other.backward()
        for p, q in zip(flat.parameters(), on_hosts.parameters(), strict=True):
            # Of the same parameters in backward, too.
            assert torch.equal(q.grad.to_local(), p.grad.to_local())
            assert p.grad.to_local().any() or not p.grad.to_local().numel()
    with torch.no_grad():
        assert torch.equal(loss_of(flat, rank, 3), loss_of(on_hosts, rank, 3))
    plan = mine.plan()
    steps = 2 * sum(sum(bytes_in_step(unit)) for unit in plan.parameters)
    evaluation = mine.parameter_wire_bytes - steps
    assert 3 * mine.parameter_wire_bytes == theirs.parameter_wire_bytes
    assert evaluation > 0
    metrics = mine.metrics()
    # One message goes to the other host, then two to the neighbour.
    assert metrics.parameter_inside_wire_bytes == 2 * metrics.parameter_wire_bytes
    assert 3 * metrics.parameter_dense_bytes == theirs.metrics().parameter_dense_bytes
    inside = 2 * sum(map(bytes_inside, plan.parameters))
    assert metrics.parameter_inside_wire_bytes == inside + 2 * evaluation
    assert "parameters of 4 units in two levels" in str(plan)


@on_ranks(4)
def test_the_link_decides_on_hosts(rank: int, world_size: int) -> None:
    """The links between hosts and inside them are measured."""
    rule = {"when": {"name": "*.weight"}, "codec": {"kind": "auto"}}
    speed = Speed(encode=1e-9, decode=1e-9)

    def speeds(codecs: Any, *_: Any) -> dict[str, Speed]:
        return {speed_key(codec): speed for codec in codecs}

    link = Link(bandwidth=1e6, latency=1e-4)
    with (
        patch.object(auto_costs, "measure_speeds", speeds),
        patch.object(auto_costs, "measure_link", lambda group, device: link),
    ):
        model = wrap(sharded(), {"schema": 1, "gradients": [rule]}, hosts=2)
    plan = tagc.compressor(model).plan()
    assert {unit.info.ranks_per_host for unit in plan.units} == {2}
    assert "measured over 2 ranks, one per host" in str(plan)
    assert "measured over 2 ranks of a host" in str(plan)


@on_ranks(4)
def test_groups_are_released_and_used_again(rank: int, world_size: int) -> None:
    before = groups()
    one, other = wrapped(QUANTIZED, hosts=2), wrapped(QUANTIZED, hosts=2)
    assert groups() == before + 2
    handle = tagc.compressor(one)
    handle.remove()
    handle.remove()  # nothing more
    assert groups() == before + 2
    tagc.compressor(other).remove()
    assert groups() == before
    run(wrapped(QUANTIZED, hosts=2), rank, range(1))
    assert groups() == before + 2


@pytest.mark.slow
@on_ranks(5)
def test_not_all_processes_need_take_part(rank: int, world_size: int) -> None:
    """The last one has no part in the model, and calls nothing."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    if rank == 4:
        return
    before = groups()
    for _ in range(2):
        model = wrapped(QUANTIZED, sharded(mesh=mesh), hosts=2)
        run(model, rank, range(2))
        assert tagc.compressor(model).metrics().inside_wire_bytes > 0
        tagc.compressor(model).remove()
        # torch would give new ones the names of those.
        assert groups() == before + 2
