"""Transports: the collectives of one group of ranks, with a count of the bytes sent.

Nothing else in the library sends gradients or parameters.

Wire bytes are the bytes that a rank must send to others: ``(W - 1) / W`` of the buffer for a
reduce-scatter or an all-to-all, twice that for an all-reduce.

On gloo, ranks send each other messages instead of calling collectives. gloo's reduce-scatter sends
twice as much as necessary, so sums use an all-to-all and a local addition, with the same result.
gloo's all-to-all and all-gather post a receive after the sends to the same rank, so the ready
signal queues behind data in the same direction: with 2 ranks, one direction often waits for the
other (49 of 96 Mbit/s measured). Messages post all receives first and use both directions.

Collectives run on the current stream, unless the caller has something to do while they are in
flight. On a GPU this saves two events between streams, and keeps the high priority of FSDP's
streams, which the group's own stream does not have.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as together

# torch 2.13 renamed the former to the latter.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Distinct tags keep these messages apart from the user's own over the same group, and headers apart
# from the messages that follow them.
_TAG, HEADER_TAG = 0x7A6C, 0x7A6D
MARKS = 2**30 - 1
"""The bits of a tag that a mark may have."""


@dataclass
class CollectiveWork:
    """A collective in flight.

    Attributes:
        wire_bytes: bytes that this rank sends to others.
        parts, out: if both are given, :meth:`wait` sums the rows of ``parts`` into ``out``.
    """

    works: Sequence[Any]
    wire_bytes: int
    parts: Tensor | None = None
    out: Tensor | None = None

    def wait(self) -> None:
        """Wait until the result can be used (on a GPU: by the current stream)."""
        for work in self.works:
            work.wait()
        self.works = ()
        if self.parts is not None and self.out is not None:
            torch.sum(self.parts, dim=0, dtype=self.out.dtype, out=self.out)
            self.parts = None


class Transport:
    """The collectives of one group of ``W`` ranks, its ``size``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._tag = _TAG
        self._gloo: dict[str, bool] = {}

    def marked(self, *mark: object) -> Transport:
        """The same collectives, whose messages on gloo meet only those of the same mark."""
        other = copy(self)
        other._tag = zlib.crc32(repr(mark).encode()) & MARKS
        return other

    def by_messages(self, device: torch.device) -> bool:
        """Whether ranks send each other messages instead of collectives."""
        # gloo has no messages for tensors on a GPU; its collectives copy those to the host.
        return device.type == "cpu" and self._on_gloo(device)

    def _on_gloo(self, device: torch.device) -> bool:
        found = self._gloo.get(device.type)
        if found is None:
            found = self._gloo[device.type] = _is_gloo(self.group, device)
        return found

    def adds_itself(self, device: torch.device) -> bool:
        """Whether :meth:`sum_each` adds locally, and so writes to ``scratch``."""
        return self._on_gloo(device)

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        columns: Sequence[slice] | None = None,
        *,
        in_flight: bool = False,
    ) -> CollectiveWork:
        """Send row ``d`` of ``inp`` ``[W, m]`` to rank ``d``; row ``r`` of ``out`` is from rank
        ``r``.

        Args:
            columns: ``columns[d]`` are the columns of its row that rank ``d`` needs. In the other
                columns rank ``d``'s ``out`` has zeros, or the senders' values.
            in_flight: whether the caller does anything else before it waits.
        """
        if columns is not None:
            return self._partial(out, inp, columns)
        if self.by_messages(inp.device):
            works = self._messages(out.unbind(), inp.unbind())
        else:
            works = _started(dist.all_to_all_single(out, inp, group=self.group, async_op=in_flight))
        return CollectiveWork(works, self._to_others(inp))

    def _partial(self, out: Tensor, inp: Tensor, columns: Sequence[slice]) -> CollectiveWork:
        if self._on_gloo(inp.device) and not self.by_messages(inp.device):
            return self.all_to_all(out, inp)  # gloo has no uneven all-to-all for a GPU
        own = columns[self.rank]
        out[:, : own.start].zero_()
        out[:, own.stop :].zero_()
        received = list(out[:, own].unbind())
        sent = [row[span] for row, span in zip(inp.unbind(), columns, strict=True)]
        return self.exchange(received, sent)

    def exchange(
        self,
        out: Sequence[Tensor],
        inp: Sequence[Tensor],
        *,
        in_flight: bool = False,
        used: Sequence[int] | None = None,
    ) -> CollectiveWork:
        """Send ``inp[d]`` to rank ``d``; ``out[r]`` is from rank ``r``. Sizes may differ. (Not for
        a GPU on gloo.)

        Args:
            in_flight: see :meth:`all_to_all`.
            used: only the first ``used[d]`` elements of ``inp[d]``, flat, are sent, and the others
                of the receiver's ``out`` keep what they have. Receivers need not know. Only if
                ranks send each other messages.
        """
        used = [t.numel() for t in inp] if used is None else used
        if self.by_messages(inp[0].device):
            works = self._messages(out, inp, used=used)
        else:
            works = _started(
                dist.all_to_all(list(out), list(inp), group=self.group, async_op=in_flight)
            )
        sent = sum(size for r, size in enumerate(used) if r != self.rank)
        return CollectiveWork(works, sent * inp[0].element_size())

    def sum_each(self, out: Tensor, inp: Tensor, scratch: Tensor) -> CollectiveWork:
        """Reduce-scatter SUM of ``n`` buffers, in one call of the backend: add all ranks' rows for
        this rank into ``out[i]``.

        Args:
            out: ``[n, m]``.
            inp: ``[n, W, m]``, row ``d`` of each for rank ``d``.
            scratch: ``[n, W, m]``, written if :meth:`adds_itself`.
        """
        works = []
        if self.adds_itself(inp.device):
            for total, rows, parts in zip(out, inp, scratch, strict=True):
                pending = self.all_to_all(parts, rows)
                pending.parts, pending.out = parts, total
                works.append(pending)
        else:
            with together(self.group) if len(out) > 1 else nullcontext():
                for total, rows in zip(out, inp, strict=True):
                    reduce_scatter(total, rows.view(-1), group=self.group)
        return CollectiveWork(works, self._to_others(inp))

    def reduce_scatter(
        self, out: Tensor, inp: Tensor, op: dist.ReduceOp.RedOpType
    ) -> CollectiveWork:
        """The backend's own reduce-scatter of ``inp`` ``[W * m]`` to ``out`` ``[m]``."""
        reduce_scatter(out, inp, op=op, group=self.group)
        return CollectiveWork((), self._to_others(inp))

    def gather(self, out: Tensor, inp: Tensor, *, in_flight: bool = False) -> CollectiveWork:
        """All-gather: rank ``r``'s ``inp`` ``[1, m]`` becomes row ``r`` of ``out`` ``[W, m]`` on
        every rank. ``inp`` may be a view of that row. ``in_flight``: see :meth:`all_to_all`."""
        if self.by_messages(inp.device):
            works = self._messages(out.unbind(), [inp[0]] * self.size)
        else:
            works = _started(all_gather(out, inp, group=self.group, async_op=in_flight))
        return CollectiveWork(works, (self.size - 1) * inp.numel() * inp.element_size())

    def gather_each(self, out: Tensor, inp: Tensor) -> CollectiveWork:
        """:meth:`gather` for each of ``n`` buffers, in one call of the backend: rank ``r``'s
        ``inp[i]`` ``[m]`` becomes ``out[i, r]`` on every rank; ``out`` is ``[n, W, m]``."""
        if self.by_messages(inp.device):
            works = [self.gather(rows, row[None]) for rows, row in zip(out, inp, strict=True)]
        else:
            works = []
            with together(self.group):
                for rows, row in zip(out, inp, strict=True):
                    all_gather(rows.view(-1), row, group=self.group)
        return CollectiveWork(works, (self.size - 1) * inp.numel() * inp.element_size())

    def all_gather(self, out: Tensor, inp: Tensor) -> CollectiveWork:
        """The backend's own all-gather of ``inp`` ``[m]`` to ``out`` ``[W * m]``. It blocks until
        it is done."""
        all_gather(out, inp, group=self.group)
        return CollectiveWork((), (self.size - 1) * inp.numel() * inp.element_size())

    def gather_values(self, values: Tensor) -> tuple[Tensor, int]:
        """Every rank's ``values``, ``[W, *values.shape]``, and the bytes sent. Blocks."""
        out = values.new_empty((self.size, *values.shape))
        work = self.all_gather(out.view(-1), values.contiguous().view(-1))
        return out, work.wire_bytes

    def all_reduce(
        self,
        t: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        in_flight: bool = False,
    ) -> CollectiveWork:
        """Sum over ranks, or another reduction, in place. ``in_flight``: see
        :meth:`all_to_all`."""
        work = dist.all_reduce(t, op=op, group=self.group, async_op=in_flight)
        return CollectiveWork(_started(work), 2 * self._to_others(t))

    def gather_headers(self, header: Tensor) -> tuple[CollectiveWork, Tensor]:
        """Start gathering every rank's ``header`` ``[n]`` into a tensor ``[W, n]``, by messages
        with a tag of their own; they count no bytes."""
        out = header.new_empty(self.size, header.numel())
        works = self._messages(out.unbind(), [header] * self.size, HEADER_TAG)
        return CollectiveWork(works, 0), out

    def _messages(
        self,
        out: Sequence[Tensor],
        sent: Sequence[Tensor],
        tag: int | None = None,
        used: Sequence[int] | None = None,
    ) -> list[Any]:
        """An all-to-all by messages; all receives are posted before the first send. ``used``: see
        :meth:`exchange`."""
        tag = self._tag if tag is None else tag
        # Each rank begins with its next neighbour, so they don't all begin with the same rank.
        others = (*range(self.rank + 1, self.size), *range(self.rank))
        works = []
        for r in others:
            if out[r].numel():
                works.append(self.receive(out[r], r, tag))
        for r in others:
            if sent[r].numel():
                works.append(self.send(sent[r], r, tag, None if used is None else used[r]))
        own = slice(None if used is None else used[self.rank])
        out[self.rank][own].copy_(sent[self.rank][own])
        return works

    def send(self, t: Tensor, rank: int, tag: int, used: int | None = None) -> Any:
        """Start sending ``t`` to ``rank``, or its first ``used`` elements."""
        return dist.isend(t[:used], group=self.group, group_dst=rank, tag=tag)

    def receive(self, t: Tensor, rank: int, tag: int) -> Any:
        """Start receiving ``t`` from ``rank``."""
        return dist.irecv(t, group=self.group, group_src=rank, tag=tag)

    def _to_others(self, t: Tensor) -> int:
        return t.numel() * t.element_size() * (self.size - 1) // self.size


class SilentGroup:
    """Stands for a process group in rehearsals, where nothing is sent."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class SilentTransport(Transport):
    """Sends nothing, and counts no bytes. For the meta device."""

    def by_messages(self, device: torch.device) -> bool:
        return False  # as on a GPU

    def adds_itself(self, device: torch.device) -> bool:
        return False

    def _send_nothing(self, *args: Any, **options: Any) -> CollectiveWork:
        return CollectiveWork((), 0)

    all_to_all = sum_each = reduce_scatter = _send_nothing
    gather = gather_each = all_gather = all_reduce = _send_nothing


class BareTransport(Transport):
    """Calls the methods of a group of gloo that :mod:`torch.distributed` does not know, such as
    torchft's.

    torch's functions work for such a group, too, until a collective fails: then they ask for its
    backend, and raise an error about that.
    """

    def all_to_all(
        self,
        out: Tensor,
        inp: Tensor,
        columns: Sequence[slice] | None = None,
        *,
        in_flight: bool = False,
    ) -> CollectiveWork:
        if self.by_messages(inp.device):
            return super().all_to_all(out, inp, columns, in_flight=in_flight)
        work = self.group.alltoall_base(out, inp, [], [], dist.AllToAllOptions())
        return CollectiveWork([work], self._to_others(inp))

    def gather(self, out: Tensor, inp: Tensor, *, in_flight: bool = False) -> CollectiveWork:
        if self.by_messages(inp.device):
            return super().gather(out, inp, in_flight=in_flight)
        return self.all_gather(out.view(-1), inp.view(-1))

    def all_gather(self, out: Tensor, inp: Tensor) -> CollectiveWork:
        self.group._allgather_base(out, inp).wait()
        return CollectiveWork((), (self.size - 1) * inp.numel() * inp.element_size())

    def all_reduce(
        self,
        t: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        in_flight: bool = False,
    ) -> CollectiveWork:
        options = dist.AllreduceOptions()
        options.reduceOp = op  # pyright: ignore
        return CollectiveWork([self.group.allreduce([t], options)], 2 * self._to_others(t))


Connect = Callable[[Any], Transport]
"""Makes the transport of a group."""


@contextmanager
def failing_in(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Name the operation in the error if a collective fails. Mostly another rank did not answer."""
    try:
        yield
    except RuntimeError as error:
        # Other kinds, such as a device out of memory, do not come from the exchange.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        if str(error).startswith("tagc: "):
            raise  # it has a name
        raise RuntimeError(
            f"tagc: {what} failed on rank {group.rank()} of {group.size()}: {error}. If it timed "
            "out or lost a connection, another rank failed or stopped: look for the first error "
            "among all ranks"
        ) from error


def check_backends(groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuse groups whose ranks cannot send each other anything."""
    for group in groups:
        name = dist.get_backend(group)
        if name == "fake":
            raise ValueError(
                "the process group has backend 'fake', which sends nothing between ranks. "
                "Start a process for each rank with backend gloo or nccl; for a plan without "
                "processes call tagc.explain(model, policy, world_size=...)"
            )
        if not group._device_types:
            raise ValueError(
                f"the process group of backend {name!r} has no backend for any device; groups of "
                "threads in one process are like that. Start a process for each rank with backend "
                "gloo or nccl"
            )


def backend_of(group: dist.ProcessGroup) -> str:
    """The backend to make another group like this one."""
    name = dist.get_backend(group)
    # A list of devices would do for all, but torch warns when such a group is destroyed.
    return str(dist.get_backend_config(group)) if name == "undefined" else name


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of a group's collectives for this device; None if its backend has none."""
    options: Any = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _started(work: Any) -> list[Any]:
    """What is in flight: nothing, if the collective ran on the current stream."""
    return [] if work is None else [work]


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    # dist.get_backend returns something else for a group with a backend per device.
    return group._get_backend(device).name().lower() == "gloo"
