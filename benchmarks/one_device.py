"""Collectives on one device instead of a network, in place of those of ``torch.distributed``: for
one rank alone, and for ranks that share the device.

NCCL refuses ranks that share a GPU. If each says that it is a host of its own, messages go through
sockets, and kernels that wait for other ranks take the GPU from them. :func:`through_memory` lets a
rank copy what it sends to memory that all ranks see, meet the others, and read. So real ranks send
real messages, and train to real losses; times say nothing of a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tagc.collect import transport
from tagc.handle import wrapper

_PATIENCE = 300.0  # seconds
_SUM = dist.ReduceOp.SUM


@contextmanager
def _replaced(made: Any) -> Iterator[None]:
    """Let FSDP2 and tagc call the collectives of ``made``."""
    names = {
        "all_gather_single": made.all_gather, "all_gather_into_tensor": made.all_gather,
        "reduce_scatter_single": made.reduce_scatter, "reduce_scatter_tensor": made.reduce_scatter,
        "all_to_all_single": made.all_to_all, "all_to_all": _refused,
        "all_reduce": made.all_reduce,
    }  # fmt: skip
    with ExitStack() as stack:
        for name in names.keys() & vars(dist).keys():
            stack.enter_context(mock.patch.object(dist, name, names[name]))
        for name in ("all_gather", "reduce_scatter"):
            stack.enter_context(mock.patch.object(transport, name, getattr(made, name)))
        yield


def _refused(*args: Any, **how: Any) -> None:
    raise NotImplementedError("no policy here sends rows of their own sizes")


class _Done:
    """A collective whose results the current stream of its caller reads, after ``event``."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def wait(self, *args: Any) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return True


class Idle:
    """Collectives that do nothing."""

    @staticmethod
    def all_gather(*args: Any, **how: Any) -> _Done:
        return _Done()

    reduce_scatter = all_to_all = all_reduce = all_gather


class Copies(Idle):
    """Collectives of rank 0, whose own data arrives where that of the others would."""

    @staticmethod
    def all_gather(output: Tensor, input: Tensor, *args: Any, **how: Any) -> _Done:
        rows = output.view(dist.get_world_size(), -1)
        rows.copy_(input.reshape(1, -1).expand_as(rows))  # input may be one of the rows
        return _Done()

    @staticmethod
    def reduce_scatter(output: Tensor, input: Tensor, *args: Any, **how: Any) -> _Done:
        output.view(-1).copy_(input.view(dist.get_world_size(), -1)[0])
        return _Done()

    @staticmethod
    def all_to_all(output: Tensor, input: Tensor, *args: Any, **how: Any) -> _Done:
        output.copy_(input)
        return _Done()


@contextmanager
def alone(ranks: int, collectives: type = Copies) -> Iterator[None]:
    """Be rank 0 of ``ranks``, of which the others are copies of this one."""

    def of_all(groups: Any, mine: Mapping[int, Any]) -> dict[int, Any]:
        return dict.fromkeys(range(ranks), mine[0])

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        # What tagc.wrap refuses and asks the other ranks for good reasons.
        asked = {"check_backends": lambda _: None, "gather_by_rank": of_all}
        with _replaced(collectives), mock.patch.multiple(wrapper, **asked):
            yield
    finally:
        dist.destroy_process_group()


class Memory:
    """What all ranks see; the parent of their processes makes it, and must live on.

    Args:
        size: bytes of the largest message.
        where: the device, or the CPU, through which messages then go.
    """

    def __init__(self, ranks: int, size: int, where: torch.device) -> None:
        # Two for each rank: it may write the next message while others still read the last one.
        shape = 2, ranks, -(-size // 256) * 256
        self.messages = torch.empty(shape, dtype=torch.uint8, device=where)
        if where.type == "cpu":
            self.messages.share_memory_()
        self.meeting = mp.get_context("spawn").Barrier(ranks)


class _Meetings:
    """Of one rank, through memory."""

    def __init__(self, memory: Memory, rank: int, device: torch.device) -> None:
        self._messages, self._meeting = memory.messages, memory.meeting
        self._rank, self._ranks = rank, memory.messages.shape[1]
        self._cuda = device.type == "cuda"
        self._turn = 0
        self._last = _Done()

    def _sent(self, mine: Tensor, group: Any) -> list[Tensor]:
        """Each rank's message, flat, until this rank's next but one; this one's is ``mine``."""
        if group is not None and group.size() != self._ranks:
            raise ValueError(f"a group of {group.size()} ranks; only all {self._ranks} can meet")
        flat = mine.detach().reshape(-1)
        size = flat.numel() * flat.element_size()
        messages = self._messages[self._turn % 2]
        self._turn += 1
        if size > messages.shape[1]:
            raise ValueError(f"a message of {size} bytes; there is room for {messages.shape[1]}")
        rows = [row[:size].view(flat.dtype) for row in messages]
        rows[self._rank].copy_(flat)
        for event in (self._last.event, self._now()):
            if event is not None:
                event.synchronize()
        self._meeting.wait(_PATIENCE)
        return rows

    def _now(self) -> Any:
        return torch.cuda.current_stream().record_event() if self._cuda else None

    def _finished(self, async_op: bool) -> _Done | None:
        self._last = _Done(self._now())
        return self._last if async_op else None

    def all_gather(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        for row, sent in zip(output.view(self._ranks, -1), self._sent(input, group), strict=True):
            row.copy_(sent)
        return self._finished(async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Any = _SUM, group: Any = None,
        async_op: bool = False,
    ) -> _Done | None:  # fmt: skip
        mine = [sent.view(self._ranks, -1)[self._rank] for sent in self._sent(input, group)]
        output.view(-1).copy_(_reduced(mine, op))
        return self._finished(async_op)

    def all_to_all(
        self, output: Tensor, input: Tensor, *, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        for row, sent in zip(output.view(self._ranks, -1), self._sent(input, group), strict=True):
            row.copy_(sent.view(self._ranks, -1)[self._rank])
        return self._finished(async_op)

    def all_reduce(
        self, tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> _Done | None:
        tensor.detach().copy_(_reduced(self._sent(tensor, group), op).view(tensor.shape))
        return self._finished(async_op)


def _reduced(rows: list[Tensor], op: Any) -> Tensor:
    ops = dist.ReduceOp
    for known, reduce in (
        (ops.SUM, torch.sum), (ops.AVG, torch.mean), (ops.MAX, torch.amax), (ops.MIN, torch.amin),
    ):  # fmt: skip
        if op == known:
            return reduce(torch.stack(rows), dim=0)
    raise ValueError(f"unknown reduction {op}")


@contextmanager
def through_memory(memory: Memory, rank: int, device: torch.device) -> Iterator[None]:
    """Replace the collectives that FSDP2 and tagc call, whose tensors are on ``device``. The
    process group only has to pass objects."""
    # The group's backend is gloo, but tagc's path is that of other backends.
    not_gloo = mock.patch.object(transport, "_is_gloo", return_value=False)
    with _replaced(_Meetings(memory, rank, device)), not_gloo:
        yield
