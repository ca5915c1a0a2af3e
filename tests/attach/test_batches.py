"""Messages of a batch reach a backend that runs batches together, as NCCL does, in one batch; by
torch's own function, and as torch 2.14 calls groups."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.coded_mesh import coded, mesh_of
from support.distributed import fails, on_ranks
from tagc.groups.activations import CodedCollectives
from tagc.groups.works import Batches

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
    group._get_backend = recorded._get_backend  # torch 2.14 asks the group itself
    return recorded


def swapped(group: Any, rank: int, mine: list[Tensor]) -> list[Tensor]:
    """What the other of two ranks sends while this one sends ``mine``."""
    received = [torch.empty_like(t) for t in mine]
    sends = [dist.P2POp(dist.isend, t, group=group, group_peer=1 - rank) for t in mine]
    receives = [dist.P2POp(dist.irecv, t, group=group, group_peer=1 - rank) for t in received]
    works = dist.batch_isend_irecv(sends + receives)
    assert len(works) in (1, len(sends + receives))
    for work in works:
        work.wait()
        assert work.is_completed()
    return received


@on_ranks(2)
def test_a_batch_is_one_for_the_backend(rank: int, world_size: int) -> None:
    """With tensors that are coded and such that are not. Nothing of it is kept, not even until
    Python looks for cycles: on a GPU that may be much memory."""
    group = mesh_of(2).get_group()
    recorded = recording(group)
    torch.manual_seed(1)
    both = torch.randn(2, N)
    small = torch.arange(3.0) + rank
    gc.disable()
    try:
        for _ in range(2):
            mine = both[rank].clone()
            wide, plain = swapped(group, rank, [mine, small])
            assert torch.equal(wide, coded(both[1 - rank]))
            assert torch.equal(plain, torch.arange(3.0) + 1 - rank)
            seen = [weakref.ref(mine), weakref.ref(wide)]
            del mine, wide
            assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
    assert recorded.seen == 2 * ["start", "send", "send", "receive", "receive", "end"]


@on_ranks(2)
def test_torch_starts_and_ends_a_batch(rank: int, world_size: int) -> None:
    """As torch 2.14 does: it drops the works of the messages, and waits for the batch's."""
    group: Any = mesh_of(2).get_group()
    recorded = recording(group)
    sent, received, device = torch.randn(N), torch.empty(N), torch.device("cpu")
    group._start_coalescing(device)
    dist.isend(sent, group=group, group_dst=1 - rank)
    dist.irecv(received, group=group, group_src=1 - rank)
    group._end_coalescing(device).wait()
    assert torch.equal(received, coded(sent))  # all ranks have the same seed
    assert recorded.seen == ["start", "send", "receive", "end"]
    group._start_coalescing(device)
    with tagc.activations():
        failed = fails(lambda: dist.all_reduce(received, group=group))
    group._end_coalescing(device)
    assert failed[0] == "RuntimeError"
    assert "codes no collectives between the start and the end" in failed[1]


@on_ranks(2)
def test_an_error_ends_the_batch(rank: int, world_size: int) -> None:
    """Whichever message fails; and the next batch has all of its own."""
    group: Any = mesh_of(2).get_group()
    recorded = recording(group)
    for place in ("the first", "the second", "its encoding"):
        recorded.seen.clear()
        if place == "its encoding":
            broken = patch.object(CodedCollectives, "message_about", side_effect=OSError("broken"))
        else:
            method = "send" if place == "the first" else "recv"
            broken = patch.object(Recorded, method, side_effect=OSError("broken"))
        with broken:
            failed = fails(lambda: swapped(group, rank, [torch.ones(N)]))
        assert failed == ("OSError", "broken")
        assert recorded.seen == ["start", *(["send"] if place == "the second" else []), "end"]
        if place == "the second":  # what was sent then arrives now
            dist.recv(torch.empty(N), group=group, group_src=1 - rank)
        assert torch.equal(swapped(group, rank, [torch.ones(N)])[0], coded(torch.ones(N)))
    # torch does not end a batch if an error leaves it: the next start does.
    recorded.seen.clear()
    for _ in range(2):
        group._start_coalescing(torch.device("cpu"))
    group._end_coalescing(torch.device("cpu"))
    assert recorded.seen == ["start", "end", "start", "end"]
    failed = fails(lambda: group._end_coalescing(torch.device("cpu")))
    assert failed == ("RuntimeError", "tagc: a batch of messages ends that did not start")
