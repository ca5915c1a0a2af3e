"""Collectives of a group that :mod:`torch.distributed` does not know, such as torchft's."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from tagc.collect.transport import CollectiveWork, Transport


class BareTransport(Transport):
    """Calls the methods of a group of gloo.

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
