"""Ranks that share one device: collectives through its memory, instead of a network.

NCCL refuses ranks that share a GPU. If each says that it is a host of its own, messages go through
sockets, and kernels that wait for other ranks take the GPU from them. Here a rank copies what it
sends to memory that all ranks see, meets the others, and reads. So real ranks send real messages,
and train to real losses; times say nothing of a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tagc.collect import transport

_PATIENCE = 300.0  # seconds


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


class _Read:
    """A collective whose results the current stream of its caller reads from memory."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self, *args: Any) -> bool:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return True


class _Collectives:
    """One rank's, in place of those of ``torch.distributed``."""

    def __init__(self, memory: Memory, rank: int, device: torch.device) -> None:
        self._messages, self._meeting = memory.messages, memory.meeting
        self._rank, self._ranks = rank, memory.messages.shape[1]
        self._cuda = device.type == "cuda"
        self._turn = 0
        self._last = _Read(None)

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

    def _done(self, async_op: bool) -> _Read | None:
        self._last = _Read(self._now())
        return self._last if async_op else None

    def all_gather(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> _Read | None:
        for row, sent in zip(output.view(self._ranks, -1), self._sent(input, group), strict=True):
            row.copy_(sent)
        return self._done(async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _Read | None:
        mine = [sent.view(self._ranks, -1)[self._rank] for sent in self._sent(input, group)]
        output.view(-1).copy_(_reduced(mine, op))
        return self._done(async_op)

    def all_to_all(
        self, output: Tensor, input: Tensor, *, group: Any = None, async_op: bool = False
    ) -> _Read | None:
        for row, sent in zip(output.view(self._ranks, -1), self._sent(input, group), strict=True):
            row.copy_(sent.view(self._ranks, -1)[self._rank])
        return self._done(async_op)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _Read | None:
        tensor.detach().copy_(_reduced(self._sent(tensor, group), op).view(tensor.shape))
        return self._done(async_op)


def _reduced(rows: list[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(rows)
    for known, reduce in (
        (dist.ReduceOp.SUM, torch.sum),
        (dist.ReduceOp.AVG, torch.mean),
        (dist.ReduceOp.MAX, torch.amax),
        (dist.ReduceOp.MIN, torch.amin),
    ):
        if op == known:
            return reduce(stacked, dim=0)
    raise ValueError(f"unknown reduction {op}")


@contextmanager
def through_memory(memory: Memory, rank: int, device: torch.device) -> Iterator[None]:
    """Replace the collectives that FSDP2 and tagc call, whose tensors are on ``device``. The
    process group only has to pass objects."""
    made = _Collectives(memory, rank, device)
    names = {
        "all_gather_single": made.all_gather, "all_gather_into_tensor": made.all_gather,
        "reduce_scatter_single": made.reduce_scatter, "reduce_scatter_tensor": made.reduce_scatter,
        "all_to_all_single": made.all_to_all, "all_reduce": made.all_reduce,
    }  # fmt: skip
    with ExitStack() as stack:
        for name in names.keys() & vars(dist).keys():
            stack.enter_context(mock.patch.object(dist, name, names[name]))
        stack.enter_context(
            mock.patch.multiple(
                transport,
                all_gather=made.all_gather,
                reduce_scatter=made.reduce_scatter,
                # The group's backend is gloo, but tagc's path is that of other backends.
                _is_gloo=lambda *_: False,
            )
        )
        yield
