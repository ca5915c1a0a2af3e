"""Ranks of a group that compresses and that stop, or come to different collectives: an error within
the group's timeout that names the collective, never a hang, a crash, or garbage. And threads of
gloo, for which nobody may wait with Python's lock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import tagc
from support.coded_mesh import policy
from support.distributed import fails, on_ranks
from support.marks import slow
from tagc.collect.transport import all_gather, reduce_scatter
from tagc.groups.activations import SMALL_MESSAGE
from tagc.groups.compressed_group import CompressedGroup

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


def collective(kind: str, group: Any, *, n: int = N) -> Tensor:
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


NAMES = r"tagc: the [a-z-]+ (of \[\d+\] )?over dimension 'tp' failed on rank \d of \d: "


# What rank 1 does, where the others run the first; None if it stops.
FAULTS: list[tuple[str, Callable[[Any], object] | None]] = [
    *((kind, None) for kind in COLLECTIVES),
    # With one element more (all-to-all: one row), messages have the same sizes.
    *(
        (kind, partial(collective, kind, n=N + more))
        for kind in COLLECTIVES
        for more in (4096, 513 if kind == "all-to-all" else 1)
    ),
    *(
        (kind, partial(collective, other))
        for kind, other in (
            ("all-reduce", "all-gather"),
            ("reduce-scatter", "all-to-all"),
            ("all-gather", "all-to-all"),
        )
    ),
    ("all-reduce", lambda group: dist.all_reduce(torch.ones(3 * N).bfloat16(), group=group)),
]


@on_ranks(3, timeout=230)
@pytest.mark.parametrize("some", [slice(0, None, 8), slow(slice(0, None))], ids=["few", "all"])
def test_a_rank_that_stops_or_differs(rank: int, world_size: int, some: slice) -> None:
    for kind, other in FAULTS[some]:
        group = impatient()
        with tagc.activations():
            collective(kind, group)  # connections are there
            began = time.monotonic()
            if rank == 1 and other is None:
                text = ""
            else:
                call = other if rank == 1 and other is not None else partial(collective, kind)
                error, text = fails(lambda call=call, group=group: call(group))
                assert error == "RuntimeError", text
                assert re.match(NAMES, text), text
                assert f"failed on rank {rank} of" in text
                assert "another rank failed or stopped" in text
                assert time.monotonic() - began < 5 * SECONDS
                if rank != 1:
                    name = "all-reduce" if kind == "functional" else kind
                    assert text.startswith(f"tagc: the {name} "), text
        dist.barrier()


@on_ranks(2)
def test_a_stage_that_gets_nothing(rank: int, world_size: int) -> None:
    group = impatient()
    t = torch.ones(N)
    if rank:
        dist.send(t, group=group, group_dst=0)
        return
    dist.recv(t, group=group, group_src=1)
    kind, text = fails(lambda: dist.recv(t, group=group, group_src=1))
    assert kind == "RuntimeError"
    assert f"tagc: the receive from rank 1 of [{N}] over dimension 'tp' failed on rank 0" in text


def test_what_torch_would_call_with_pythons_lock_held() -> None:
    """torch looks for these methods in Python. If it finds none, it calls its own with the lock,
    which threads of gloo need to free tensors."""
    (header,) = Path(torch.__file__).parent.glob("include/**/c10d/**/PyProcessGroup.hpp")
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    looked_for = set(re.findall(r"WORK_OVERRIDE\(\s*ProcessGroup,\s*(\w+)", text))
    looked_for |= set(re.findall(r'<const ProcessGroup\*>\(this\),\s*"(\w+)"', text))
    assert {"allreduce", "broadcast", "all_to_all_single"} <= looked_for, looked_for
    looked_for |= {"gather", "reduce", "scatter"}  # since 2.15
    # Nobody calls these of a group in Python from C++, or they meet no lock of gloo's.
    looked_for -= {"reconfigure", "recvAnysource", "start_coalescing", "end_coalescing"}
    assert looked_for <= vars(CompressedGroup).keys(), looked_for - vars(CompressedGroup).keys()
