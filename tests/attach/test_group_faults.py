"""Ranks of a group that compresses and that stop, or come to different collectives: an error within
the group's timeout that names the collective, never a hang, a crash, or garbage. And threads of
gloo, for which nobody may wait with Python's lock."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import tagc
from support.coded_mesh import policy
from support.distributed import on_ranks
from support.failing import fails
from support.marks import covering, slow
from tagc.attach.compressed_group import CompressedGroup
from tagc.collect.activations import SMALL_MESSAGE
from tagc.collect.transport import all_gather, reduce_scatter

N = 3 * SMALL_MESSAGE + 40
"""Elements for one rank: not a multiple of a row, so one more takes the same messages."""
SECONDS = 1.0
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "functional")


def impatient(seconds: float = SECONDS) -> Any:
    """All ranks, in a group that compresses, and that soon gives up."""
    options = tagc.dimension_options(policy(), "tp")
    group: Any = dist.new_group(
        backend="tagc", pg_options=options, timeout=timedelta(seconds=seconds)
    )
    assert isinstance(group, CompressedGroup)
    return group


def collective(kind: str, group: Any, n: int = N) -> Tensor:
    """Run one, with ``n`` elements for each rank."""
    size = group.size()
    mine = torch.ones(size * n)
    out = torch.empty(size * n)
    if kind == "all-reduce":
        dist.all_reduce(mine, group=group)
        return mine
    if kind == "functional":
        return functional.all_reduce(mine, "sum", group) + 0
    if kind == "all-gather":
        all_gather(out, mine[:n], group=group)
    elif kind == "reduce-scatter":
        reduce_scatter(out[:n], mine, group=group)
    else:
        dist.all_to_all_single(out, mine, group=group)
    return out


def names(kind: str) -> str:
    """How an error begins."""
    kind = "all-reduce" if kind == "functional" else kind
    return rf"tagc: the {kind} (of \[\d+\] )?over dimension 'tp' failed on rank \d of \d: "


def check(said: tuple[str, str], kind: str, rank: int, began: float) -> None:
    """That this was an error of this collective on this rank, in time."""
    error, text = said
    assert error == "RuntimeError", said
    assert re.match(names(kind), text), text
    assert f"failed on rank {rank} of" in text
    assert "another rank failed or stopped" in text
    assert time.monotonic() - began < 5 * SECONDS


@pytest.mark.some(2)
@on_ranks(slow(2), 3)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_rank_that_stops_or_raises(rank: int, world_size: int, kind: str) -> None:
    group = impatient()
    with tagc.activations():
        collective(kind, group)  # connections are there
        if rank == 1:
            return
        began = time.monotonic()
        check(fails(lambda: collective(kind, group)), kind, rank, began)


@pytest.mark.some(2)
@on_ranks(slow(2), 3)
@pytest.mark.parametrize(("kind", "more"), covering(COLLECTIVES, (1, 4096)))
def test_another_shape_on_one_rank(rank: int, world_size: int, kind: str, more: int) -> None:
    """With one element more, messages have the same sizes."""
    if kind == "all-to-all" and more == 1:
        more = 513  # a row
    group = impatient()
    with tagc.activations():
        collective(kind, group)
        began = time.monotonic()
        n = N + more * (rank == 1)
        check(fails(lambda: collective(kind, group, n)), kind, rank, began)


@pytest.mark.some(1)
@on_ranks(slow(2), 3)
@pytest.mark.parametrize(
    ("kind", "other"),
    [("all-reduce", "all-gather"), ("reduce-scatter", "all-to-all"), ("all-gather", "all-to-all")],
)
def test_another_collective_on_one_rank(rank: int, world_size: int, kind: str, other: str) -> None:
    group = impatient()
    with tagc.activations():
        began = time.monotonic()
        mine = other if rank == 1 else kind
        check(fails(lambda: collective(mine, group)), mine, rank, began)


@on_ranks(2)
def test_another_dtype_on_one_rank(rank: int, world_size: int) -> None:
    group = impatient()
    t = torch.ones(2 * N, dtype=torch.bfloat16 if rank else torch.float32)
    with tagc.activations():
        began = time.monotonic()
        check(fails(lambda: dist.all_reduce(t, group=group)), "all-reduce", rank, began)


@on_ranks(2)
def test_a_stage_that_gets_nothing(rank: int, world_size: int) -> None:
    group = impatient()
    t = torch.ones(N)
    if rank:
        dist.send(t, group=group, group_dst=0)
        return
    dist.recv(t, group=group, group_src=1)
    kind, said = fails(lambda: dist.recv(t, group=group, group_src=1))
    assert kind == "RuntimeError"
    assert f"tagc: the receive from rank 1 of [{N}] over dimension 'tp' failed on rank 0" in said


def test_what_torch_would_call_with_pythons_lock_held() -> None:
    """torch looks for these methods in Python. If it finds none, it calls its own with the lock;
    see the next test."""
    (header,) = Path(torch.__file__).parent.glob("include/**/c10d/**/PyProcessGroup.hpp")
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    looked_for = set(re.findall(r"WORK_OVERRIDE\(\s*ProcessGroup,\s*(\w+)", text))
    looked_for |= set(re.findall(r'<const ProcessGroup\*>\(this\),\s*"(\w+)"', text))
    assert {"allreduce", "broadcast", "all_to_all_single"} <= looked_for, looked_for
    looked_for |= {"gather", "reduce", "scatter"}  # since 2.15
    # Nobody calls these of a group in Python from C++, or they meet no lock of gloo's.
    looked_for -= {"reconfigure", "recvAnysource", "start_coalescing", "end_coalescing"}
    assert looked_for <= vars(CompressedGroup).keys(), looked_for - vars(CompressedGroup).keys()


@pytest.mark.slow
@on_ranks(2)
def test_threads_of_gloo_that_free_tensors(rank: int, world_size: int) -> None:
    """They need Python's lock while they hold gloo's. While torch started broadcasts (2.15: also
    scatters) with Python's lock held, most runs as long as this hung."""
    group = impatient(10.0)
    for _ in range(3000):
        out, given = torch.empty(2000), [torch.ones(2000)] * world_size
        work: Any = dist.scatter(
            out, given if rank == 0 else None, group=group, async_op=True, group_src=0
        )
        work.wait()
        del work, out, given
        dist.broadcast(torch.ones(2), group=group, group_src=0)
    dist.barrier(group=group)
