"""Exchanges: how messages reach those who decode them. See :class:`tagc.codecs.Exchange`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.comm.collectives import (
    CollectiveWork,
    all_reduce_sum,
    all_to_all,
    gather_messages,
    gather_rows,
    sum_rows,
)


class GroupExchange:
    """What exchanges share: a group, buffers, and a counter of bytes."""

    def __init__(self, group: dist.ProcessGroup, workspace: Workspace) -> None:
        self._group, self._workspace = group, workspace
        self.wire_bytes = 0

    def add_inside(self, grad: Tensor) -> Tensor:
        """Every rank sends for itself."""
        return grad

    def sum_counts(self, counts: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.sum_counts`."""
        return self._counted(all_reduce_sum(counts, self._group))

    def gather(self, values: Tensor) -> Tensor:
        """See :meth:`tagc.codecs.Exchange.gather`."""
        self.wire_bytes += (self._group.size() - 1) * values.numel() * values.element_size()
        return gather_rows(values, self._group)

    def _counted(self, work: CollectiveWork) -> CollectiveWork:
        self.wire_bytes += work.wire_bytes
        return work


class ShardExchange(GroupExchange):
    """A reduce-scatter: every rank owns a row, and gets a message about it from every rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        workspace: Workspace,
        sent: Sequence[slice] | None = None,
    ) -> None:
        """An exchange in one direction.

        Args:
            sent: words of the message to each owner that are sent; all of them if None.
        """
        super().__init__(group, workspace)
        self.row = group.rank()
        self.takes_leftovers = True
        self._sent = sent

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.send`."""
        return all_to_all(received, message, self._group, self._sent)

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`."""
        total = self._workspace.take("cells_sum", (cells.shape[1],), cells.dtype)
        scratch = self._workspace.take("cells_recv", tuple(cells.shape), cells.dtype)
        return self._counted(sum_rows(total, cells, scratch, self._group)), total


class BroadcastExchange(GroupExchange):
    """An all-reduce, or an all-gather: one message for everybody, and everybody decodes it."""

    def __init__(self, group: dist.ProcessGroup, workspace: Workspace) -> None:
        super().__init__(group, workspace)
        self.row = 0
        self.takes_leftovers = group.rank() == 0

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.send`."""
        return gather_messages(received, message, self._group)

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`; the sum is in place."""
        return self._counted(all_reduce_sum(cells, self._group)), cells[0]
