"""Messages of a batch reach a backend that runs batches together, as NCCL does, in one batch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from support.coded_mesh import coded, mesh_of
from support.distributed import on_ranks
from support.failing import fails
from tagc.attach.batches import Batches, posted_with

N = 5000


class Recorded:
    """A group of gloo that claims to have batches, and notes what it gets.

    Attributes:
        seen: calls so far.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._works: list[Any] = []
        self._open = False
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(supports_coalescing=True)

    def _start_coalescing(self, device: torch.device) -> None:
        assert not self._open
        self._open, self._works = True, []
        self.seen.append("start")

    def _end_coalescing(self, device: torch.device) -> Any:
        assert self._open
        self._open = False
        self.seen.append("end")
        works = self._works

        def wait() -> bool:
            while works:  # gloo's works are waited for once, NCCL's often
                works.pop().wait()
            return True

        return SimpleNamespace(wait=wait, is_completed=lambda: not works)

    def send(self, *args: Any) -> Any:
        return self._note("send", self._inner.send(*args))

    def recv(self, *args: Any) -> Any:
        return self._note("receive", self._inner.recv(*args))

    def _note(self, kind: str, work: Any) -> Any:
        self.seen.append(kind)
        if self._open:
            self._works.append(work)
            return None
        return work


def recording(group: Any) -> Recorded:
    recorded = Recorded(group._inner)
    group._inner, group._batches = recorded, Batches(recorded)  # type: ignore[arg-type]
    return recorded


def swapped(group: Any, rank: int, mine: list[Tensor]) -> list[Tensor]:
    """What the other of two ranks sends while this one sends ``mine``."""
    received = [torch.empty_like(t) for t in mine]
    sends = [dist.P2POp(dist.isend, t, group=group, group_peer=1 - rank) for t in mine]
    receives = [dist.P2POp(dist.irecv, t, group=group, group_peer=1 - rank) for t in received]
    works = dist.batch_isend_irecv(sends + receives)
    assert len(works) == len(sends + receives)
    for work in works:
        work.wait()
        assert work.is_completed()
    return received


@on_ranks(2)
def test_a_batch_is_one_for_the_backend(rank: int, world_size: int) -> None:
    """With tensors that are coded and such that are not."""
    group = mesh_of(2).get_group()
    recorded = recording(group)
    torch.manual_seed(1)
    both = torch.randn(2, N)
    small = torch.arange(3.0) + rank
    for _ in range(2):
        wide, plain = swapped(group, rank, [both[rank], small])
        assert torch.equal(wide, coded(both[1 - rank]))
        assert torch.equal(plain, torch.arange(3.0) + 1 - rank)
    assert recorded.seen == 2 * ["start", "send", "send", "receive", "receive", "end"]


@on_ranks(2)
def test_messages_by_themselves_need_no_batch(rank: int, world_size: int) -> None:
    group: Any = mesh_of(2).get_group()
    recorded = recording(group)
    t = torch.ones(N)
    if rank == 0:
        dist.send(t, group=group, group_dst=1)
    else:
        dist.recv(t.zero_(), group=group, group_src=0)
        assert torch.equal(t, coded(torch.ones(N)))
    assert recorded.seen == ["send" if rank == 0 else "receive"]


@on_ranks(2)
def test_an_error_ends_the_batch(rank: int, world_size: int) -> None:
    group: Any = mesh_of(2).get_group()
    recorded = recording(group)
    with patch.object(Recorded, "send", side_effect=ConnectionError("broken")):
        failed = fails(lambda: swapped(group, rank, [torch.ones(N)]))
    assert failed == ("ConnectionError", "broken")
    assert recorded.seen == ["start", "end"]
    assert torch.equal(swapped(group, rank, [torch.ones(N)])[0], coded(torch.ones(N)))


@on_ranks(2)
def test_a_pipeline(rank: int, world_size: int) -> None:
    """torch's schedule posts sends and receives in batches."""
    group = mesh_of(2, names=("pp",)).get_group()
    recorded = recording(group)
    torch.manual_seed(1)
    stage = PipelineStage(
        torch.nn.Linear(64, 64), rank, world_size, torch.device("cpu"), group=group
    )
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda y, _: y.square().mean())
    x = torch.randn(256, 64)
    schedule.step(x) if rank == 0 else schedule.step(target=x)
    recorded.seen.clear()
    schedule.step(x) if rank == 0 else schedule.step(target=x)
    # Later versions of torch post sends alone and receives alone one by one.
    batches = [batch.split() for batch in " ".join(recorded.seen).split("start")[1:]]
    assert all(batch.count("end") == 1 for batch in batches)
    assert any(batch[:3] == ["send", "receive", "end"] for batch in batches)


def test_another_torch_is_refused() -> None:
    """One whose function has no list of that name."""

    def batch_isend_irecv(messages: list[int]) -> object:
        return posted_with(SimpleNamespace(f_back=inspect.currentframe()))

    with (
        patch.object(dist, "batch_isend_irecv", batch_isend_irecv),
        pytest.raises(RuntimeError, match="does not know this torch's batch_isend_irecv"),
    ):
        batch_isend_irecv([1])
