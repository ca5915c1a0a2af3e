"""Collectives: started together, waited for one by one, every byte counted.

Wire bytes are what a rank must send to others: ``(W - 1) / W`` of the buffer for a reduce-scatter
or an all-to-all, twice that for an all-reduce.

gloo gets messages instead of collectives. Its reduce-scatter sends twice what it must, so sums go
by all-to-all and a local addition, to the same result. And its all-to-all and all-gather post a
receive behind the sends to the same rank, so that the word that this rank is ready waits for data
that goes the same way: with 2 ranks one direction often waits for the other (49 of 96 Mbit/s
measured). Messages whose receives are all posted first use both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the former to the latter.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# So that a message of the user's own, over the same group, is never taken for one of these, nor a
# header for what follows it.
_TAG, HEADER_TAG = 0x7A6C, 0x7A6D


@dataclass
class CollectiveWork:
    """A collective in flight.

    Attributes:
        wire_bytes: bytes that this rank sends to others.
    """

    works: Sequence[Any]
    wire_bytes: int
    parts: Tensor | None = None
    out: Tensor | None = None

    def wait(self) -> None:
        """Until the result can be used (on a GPU: by the current stream)."""
        for work in self.works:
            work.wait()
        self.works = ()
        if self.parts is not None and self.out is not None:
            torch.sum(self.parts, dim=0, dtype=self.out.dtype, out=self.out)
            self.parts = None


@contextmanager
def failing_in(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Say what failed, where a collective fails: in most cases another rank did not answer."""
    try:
        yield
    except RuntimeError as error:
        # Other kinds, such as a device out of memory, are no matter of the exchange.
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        raise RuntimeError(
            f"tagc: {what} failed on rank {group.rank()} of {group.size()}: {error}. If it timed "
            "out or lost a connection, another rank failed or stopped: look for the first error "
            "among all ranks"
        ) from error


def _to_others(t: Tensor, world_size: int) -> int:
    return t.numel() * t.element_size() * (world_size - 1) // world_size


def all_to_all(
    out: Tensor, inp: Tensor, group: dist.ProcessGroup, columns: Sequence[slice] | None = None
) -> CollectiveWork:
    """Row ``d`` of ``inp`` ``[W, m]`` goes to rank ``d``; row ``r`` of ``out`` came from ``r``.

    Args:
        columns: those that rank ``d`` needs of its row; the others of its ``out`` are zeros, or
            what the row had there.
    """
    if columns is not None:
        return _partial(out, inp, group, columns)
    if by_messages(group, inp.device):
        works = _messages(out.unbind(), inp.unbind(), group)
    else:
        works = [dist.all_to_all_single(out, inp, group=group, async_op=True)]
    return CollectiveWork(works, _to_others(inp, group.size()))


def _partial(
    out: Tensor, inp: Tensor, group: dist.ProcessGroup, columns: Sequence[slice]
) -> CollectiveWork:
    if _is_gloo(group, inp.device) and not by_messages(group, inp.device):
        return all_to_all(out, inp, group)  # it has no other for a GPU
    rank = group.rank()
    own = columns[rank]
    out[:, : own.start].zero_()
    out[:, own.stop :].zero_()
    received = list(out[:, own].unbind())
    sent = [row[span] for row, span in zip(inp.unbind(), columns, strict=True)]
    if by_messages(group, inp.device):
        works = _messages(received, sent, group)
    else:
        works = [dist.all_to_all(received, sent, group=group, async_op=True)]
    numel = sum(t.numel() for r, t in enumerate(sent) if r != rank)
    return CollectiveWork(works, numel * inp.element_size())


def _messages(
    out: Sequence[Tensor], sent: Sequence[Tensor], group: dist.ProcessGroup, tag: int = _TAG
) -> list[Any]:
    """An all-to-all by messages, every receive posted before the first send."""
    rank, ranks = group.rank(), group.size()
    # Each rank begins with its neighbour, so that no rank is everybody's first.
    others = [(rank + i) % ranks for i in range(1, ranks)]
    works = [
        dist.irecv(out[r], group=group, group_src=r, tag=tag) for r in others if out[r].numel()
    ]
    works += [
        dist.isend(sent[r], group=group, group_dst=r, tag=tag) for r in others if sent[r].numel()
    ]
    out[rank].copy_(sent[rank])
    return works


def gather_headers(header: Tensor, group: dist.ProcessGroup) -> tuple[CollectiveWork, Tensor]:
    """Start gathering ``header`` ``[n]`` of every rank, by messages that nothing else is taken for.

    Returns:
        The work, whose bytes are not counted, and where the headers ``[W, n]`` will be.
    """
    out = header.new_empty(group.size(), header.numel())
    return CollectiveWork(_messages(out.unbind(), [header] * len(out), group, HEADER_TAG), 0), out


def check_backends(groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuse groups whose ranks cannot send each other anything, before they try.

    Raises:
        ValueError: for a group of backend ``fake``, or of no backend for any device.
    """
    for group in groups:
        name = dist.get_backend(group)
        if name == "fake":
            raise ValueError(
                "the process group has backend 'fake', by which ranks hear nothing of each other. "
                "Start a process for each rank with backend gloo or nccl; for a plan without "
                "processes call tagc.explain(model, policy, world_size=...)"
            )
        if not group._device_types:
            raise ValueError(
                f"the process group of backend {name!r} has no backend for any device, as where "
                "ranks are threads of one process. Start a process for each rank with backend gloo "
                "or nccl"
            )


def by_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ranks of the group send each other messages instead of collectives."""
    # gloo has no messages for tensors on a GPU; its collectives copy those to the host.
    return device.type == "cpu" and _is_gloo(group, device)


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    # Not by dist.get_backend, which a group with a backend per device answers otherwise.
    return group._get_backend(device).name().lower() == "gloo"


def adds_itself(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether :func:`sum_rows` adds up by itself, and so writes to ``scratch``."""
    return _is_gloo(group, device)


def sum_rows(out: Tensor, inp: Tensor, scratch: Tensor, group: dist.ProcessGroup) -> CollectiveWork:
    """Reduce-scatter SUM: ``out`` ``[m]`` is the sum over ranks of their row for this rank.

    Args:
        scratch: like ``inp`` ``[W, m]``, used where the backend's reduce-scatter is wasteful.
    """
    if _is_gloo(group, inp.device):
        pending = all_to_all(scratch, inp, group)
        pending.parts, pending.out = scratch, out
        return pending
    work = reduce_scatter(out, inp.view(-1), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return CollectiveWork([work], _to_others(inp, group.size()))


def gather_messages(out: Tensor, inp: Tensor, group: dist.ProcessGroup) -> CollectiveWork:
    """``inp`` ``[1, m]`` of rank ``r`` is row ``r`` of ``out`` ``[W, m]`` on every rank; it may lie
    there already."""
    if by_messages(group, inp.device):
        return gather_to_rows(out.unbind(), inp[0], group)
    works = [all_gather(out.view(-1), inp.view(-1), group=group, async_op=True)]
    return CollectiveWork(works, (group.size() - 1) * inp.numel() * inp.element_size())


def gather_to_rows(out: Sequence[Tensor], inp: Tensor, group: dist.ProcessGroup) -> CollectiveWork:
    """``inp`` ``[m]`` of rank ``r`` is ``out[r]`` on every rank, wherever these rows lie."""
    if by_messages(group, inp.device):
        works = _messages(out, [inp] * group.size(), group)
    else:
        works = [dist.all_gather(list(out), inp, group=group, async_op=True)]
    return CollectiveWork(works, (group.size() - 1) * inp.numel() * inp.element_size())


def dense_reduce_scatter(
    out: Tensor, inp: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType
) -> CollectiveWork:
    """The backend's own reduce-scatter of ``inp`` ``[W * m]`` to ``out`` ``[m]``."""
    work = reduce_scatter(out, inp, op=op, group=group, async_op=True)
    return CollectiveWork([work], _to_others(inp, group.size()))


def all_reduce_sum(t: Tensor, group: dist.ProcessGroup) -> CollectiveWork:
    """Sum over ranks, in place."""
    work = dist.all_reduce(t, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return CollectiveWork([work], 2 * _to_others(t, group.size()))


def gather_rows(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``t`` of every rank, ``[R, *t.shape]``, synchronously."""
    out = t.new_empty((group.size(), *t.shape))
    all_gather(out.view(-1), t.contiguous().view(-1), group=group)
    return out
