"""``tagc.wrap(..., hosts=…)``: what a model does with several ranks on a host."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tagc
from support.distributed import on_ranks
from support.fsdp1_net import sharded as sharded_by_fsdp1
from support.small_net import sharded
from support.states import POLICIES, run, wrapped
from tagc.collect import hosts

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
    assert "hosts: two levels, 2 hosts of 2 ranks (found by the hosts' names)" in plan.notes
    assert "gradients of 4 units in two levels" in str(plan)
    for reducer in tagc.compressor(model).reducers:
        assert all(residual.shape[0] == 2 for residual in reducer.residuals.values())

    flat = auto(rank, "aaab")
    assert "hosts: every rank sends for itself" in str(tagc.compressor(flat).plan())
    of_fsdp1 = auto(rank, "aabb", model=sharded_by_fsdp1())
    assert "FSDP1 has no rows for hosts" in str(tagc.compressor(of_fsdp1).plan())
    before = groups()
    with patch.dict("os.environ", TAGC_DISABLE="1"), pytest.warns(UserWarning, match="DISABLE"):
        off = auto(rank, "aabb")
    assert groups() == before
    run(off, rank, range(1))
    assert tagc.compressor(off).wire_bytes == 0


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
