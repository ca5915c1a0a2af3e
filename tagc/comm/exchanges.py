"""Exchanges: how messages reach those who decode them. See :class:`tagc.codecs.Exchange`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.comm.collectives import (
    CollectiveWork,
    adds_itself,
    all_reduce_sum,
    all_to_all,
    gather_messages,
    gather_rows,
    gather_to_rows,
    sum_rows,
)
from tagc.comm.hosts import HostGroups


class GroupExchange(ABC):
    """What exchanges share: a group, buffers, and counters of bytes. See
    :class:`tagc.codecs.Exchange`.

    Attributes:
        groups: that this rank exchanges anything with, the one between hosts last.
        inside_bytes: sent so far to ranks of the same host, where those add up first.
    """

    row: int
    takes_leftovers: bool

    def __init__(self, group: dist.ProcessGroup, workspace: Workspace) -> None:
        self._group, self._workspace = group, workspace
        self.groups: tuple[dist.ProcessGroup, ...] = (group,)
        self.wire_bytes = 0
        self.inside_bytes = 0

    def add_inside(self, grad: Tensor) -> Tensor:
        """See :meth:`tagc.codecs.Exchange.add_inside`: every rank sends for itself."""
        return grad

    def send_inside(self, received: Tensor, messages: Tensor) -> None:
        """Send neighbours messages about what they add up, and wait for theirs; only where ranks of
        a host add up first.

        Args:
            received: ``[H, R, words]`` int32: ``[h, q]`` is neighbour ``q``'s about what this rank
                adds up for host ``h``.
            messages: ``[H * R, words]`` int32, a row for every rank.
        """
        raise NotImplementedError

    @abstractmethod
    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.send`."""

    @abstractmethod
    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`."""

    @abstractmethod
    def sum_dense(self, out: Tensor, grad: Tensor) -> CollectiveWork:
        """Start summing ``grad`` ``[D, S]`` over ranks, as it is; the sum of the row that this rank
        decodes goes to ``out`` ``[S]``. Its bytes are those of the work."""

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

    def sum_dense(self, out: Tensor, grad: Tensor) -> CollectiveWork:
        """See :meth:`GroupExchange.sum_dense`."""
        scratch = self._workspace.take("dense_recv", tuple(grad.shape), grad.dtype)
        return sum_rows(out, grad, scratch, self._group)

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`."""
        total = self._workspace.take("cells_sum", (cells.shape[1],), cells.dtype)
        scratch = self._workspace.take("cells_recv", tuple(cells.shape), cells.dtype)
        return self._counted(sum_rows(total, cells, scratch, self._group)), total


class HostExchange(ShardExchange):
    """A reduce-scatter in two levels: ranks of a host add up, and messages go between hosts.

    Rank ``h * R + r`` adds up what its host has for the ranks ``r`` of all hosts, and exchanges
    messages with them: its rows are hosts.
    """

    def __init__(self, hosts: HostGroups, workspace: Workspace) -> None:
        """An exchange between hosts."""
        super().__init__(hosts.across, workspace)
        self._inside = hosts.inside
        self.groups = (hosts.inside, hosts.across)

    def add_inside(self, grad: Tensor) -> Tensor:
        """See :meth:`tagc.codecs.Exchange.add_inside`: ``[H * R, S]`` to ``[H, S]``, in the dtype
        of ``grad``, ranks added in their order. A buffer that the next call overwrites."""
        H, R, S = self._group.size(), self._inside.size(), grad.shape[1]
        total = self._workspace.take("inside_sum", (H, S), grad.dtype)
        rows = grad.view(H, R, S)
        scratch = rows
        if adds_itself(self._inside, grad.device):
            scratch = self._workspace.take("inside_recv", (H, R, S), grad.dtype)
        works = [sum_rows(total[h], rows[h], scratch[h], self._inside) for h in range(H)]
        for work in works:
            work.wait()
            self.inside_bytes += work.wire_bytes
        return total

    def send_inside(self, received: Tensor, messages: Tensor) -> None:
        """See :meth:`GroupExchange.send_inside`."""
        rows = messages.view(received.shape)
        works = [all_to_all(received[h], rows[h], self._inside) for h in range(len(rows))]
        for work in works:
            work.wait()
            self.inside_bytes += work.wire_bytes


class BroadcastExchange(GroupExchange):
    """An all-reduce, or an all-gather: one message for everybody, and everybody decodes it."""

    def __init__(self, group: dist.ProcessGroup, workspace: Workspace) -> None:
        super().__init__(group, workspace)
        self.row = 0
        self.takes_leftovers = group.rank() == 0

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.send`."""
        return self.send_across(received, message)

    def send_across(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """Likewise, between hosts only: ``message`` ``[1, n]`` of the rank with this one's place on
        host ``h`` to ``received[h]`` ``[n]``, where it may lie already."""
        return gather_messages(received, message, self._group)

    def share(self, out: Tensor, rows: Tensor) -> None:
        """Write what the ranks of a host have between them to ``out`` ``[H * R, n]``.

        Args:
            rows: ``[H, n]``, those of this rank: its ``h`` is row ``h * R + r`` of ``out``.
        """
        out.copy_(rows)

    def sum_dense(self, out: Tensor, grad: Tensor) -> CollectiveWork:
        """See :meth:`GroupExchange.sum_dense`; ``out`` may be ``grad``."""
        if out.data_ptr() != grad.data_ptr():
            out.copy_(grad)
        return all_reduce_sum(out, self._group)

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`; the sum is in place."""
        return self._counted(all_reduce_sum(cells, self._group)), cells[0]


class HostBroadcastExchange(BroadcastExchange):
    """An all-gather in two levels: messages go between hosts, and ranks of a host hand them on."""

    def __init__(self, hosts: HostGroups, workspace: Workspace) -> None:
        """An exchange between hosts."""
        super().__init__(hosts.across, workspace)
        self._inside = hosts.inside
        self.groups = (hosts.inside, hosts.across)

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.send`; this one waits for the messages, in the order of
        all ranks: row ``h * R + r`` of ``received`` comes from the ``r``-th rank of host ``h``.

        Its work has the bytes to other hosts.
        """
        hosts = received.view(self._group.size(), self._inside.size(), -1)
        across = gather_to_rows(hosts[:, self._inside.rank()].unbind(), message[0], self._group)
        across.wait()
        self._hand_on(hosts)
        return across

    def share(self, out: Tensor, rows: Tensor) -> None:
        """See :meth:`BroadcastExchange.share`."""
        hosts = out.view(self._group.size(), self._inside.size(), -1)
        hosts[:, self._inside.rank()] = rows
        self._hand_on(hosts)

    def _hand_on(self, hosts: Tensor) -> None:
        """Tell the neighbours what this rank has of every host in ``hosts`` ``[H, R, n]``, in
        place, as they do."""
        own = self._inside.rank()
        works = [gather_messages(rows, rows[own : own + 1], self._inside) for rows in hosts]
        for work in works:
            work.wait()
            self.inside_bytes += work.wire_bytes


Connect = Callable[[dist.ProcessGroup], GroupExchange]
"""Makes the exchange over a group, for one collective of a unit."""
