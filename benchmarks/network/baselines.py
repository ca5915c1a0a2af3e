"""Collectives for dense FSDP2 without gloo's waste, which tagc is compared with.

gloo's own reduce-scatter sends twice what it must; messages to each rank and a local sum do not.
gloo's all-to-all posts every receive behind a send to the same rank, so the word that this rank is
ready waits for the data that goes the same way: with 2 ranks one direction waits for the other.
Messages whose receives are posted first (:func:`exchange`) use both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from tagc.collect import HostGroups

from . import ledger

# torch 2.13 renamed the former to the latter.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def exchange(
    out: Sequence[Tensor], sent: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """An all-to-all by point-to-point messages, all receives posted before the first send.

    Args:
        out: what every rank of ``group`` sent to this one, contiguous each.
        sent: what this rank sends to every one; may be the same tensor each time.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    others = [(rank + i) % ranks for i in range(1, ranks)]
    works = [dist.irecv(out[other], group=group, group_src=other) for other in others]
    works += [dist.isend(sent[other], group=group, group_dst=other) for other in others]
    out[rank].copy_(sent[rank])
    for work in works:
        assert work is not None
        work.wait()


class _Messages:
    """What both directions have.

    Args:
        wire: dtype that travels.
        hosts: work in two levels, inside a host and between hosts.
    """

    def __init__(self, wire: torch.dtype, hosts: HostGroups | None = None) -> None:
        self._wire, self._hosts = wire, hosts

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class MessageReduceScatter(_Messages, ReduceScatter):
    """Reduce-scatter (AVG or SUM) by messages and a sum in fp32 on the owner; on hosts, added up
    inside the host first, then sent to one rank of each other host."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(f"this reduce-scatter averages or sums, it cannot do {op}")
        sent = input_tensor.to(self._wire).view(group.size(), -1)
        if self._hosts is not None:
            sent, group = self._add_inside(sent, self._hosts), self._hosts.across
        received = torch.empty_like(sent)
        exchange(received.unbind(), sent.unbind(), group)
        total = received.sum(0, dtype=torch.float32)
        if op == dist.ReduceOp.AVG:
            total /= input_tensor.numel() // output_tensor.numel()
        output_tensor.copy_(total)

    def _add_inside(self, sent: Tensor, hosts: HostGroups) -> Tensor:
        """The host's sums ``[H, S]`` of the rows for the ranks with this place on each host."""
        R = hosts.inside.size()
        by_place = sent.view(-1, R, sent.shape[1]).transpose(0, 1).contiguous()
        received = torch.empty_like(by_place)
        exchange(received.unbind(), by_place.unbind(), hosts.inside)
        return received.sum(0, dtype=torch.float32).to(self._wire)


class MessageAllGather(_Messages, AllGather):
    """All-gather of fp32 parameters by messages. Every rank computes in fp32 with parameters that
    were rounded to ``wire``, its own, too, so that all ranks agree. On hosts, a rank sends to one
    rank of each other host, and inside the host what came."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        # The input is a part of the output, so it is copied even where nothing is cast.
        sent = input_tensor.to(self._wire, copy=True)
        rows = torch.empty_like(output_tensor, dtype=self._wire).view(group.size(), -1)
        with ledger.direction(ledger.PARAMETERS):
            if self._hosts is None:
                exchange(rows.unbind(), [sent] * group.size(), group)
            else:
                self._in_levels(rows, sent, self._hosts)
        output_tensor.copy_(rows.view(-1))

    @staticmethod
    def _in_levels(rows: Tensor, sent: Tensor, hosts: HostGroups) -> None:
        by_host = rows.view(hosts.across.size(), hosts.inside.size(), -1)
        own = hosts.inside.rank()
        exchange(by_host[:, own].unbind(), [sent] * len(by_host), hosts.across)
        for of_host in by_host:
            exchange(of_host.unbind(), [of_host[own]] * len(of_host), hosts.inside)
