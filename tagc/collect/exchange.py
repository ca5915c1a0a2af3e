"""The codecs' exchanges besides messages, and the all-gather of messages on one or two levels."""

from __future__ import annotations

from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect.transport import CollectiveWork, Transport


class Exchange:
    """The exchange of one reduction, over one transport. See :class:`tagc.codecs.Exchange`.

    Attributes:
        wire_bytes: bytes sent so far, without messages.
    """

    def __init__(self, transport: Transport, workspace: Workspace, *, for_all: bool) -> None:
        """Start with no bytes sent.

        Args:
            for_all: True for an all-reduce, with one message for all, in which all ranks decode the
                same row; False for a reduce-scatter, in which every rank owns a row.
        """
        self._transport, self._workspace, self._for_all = transport, workspace, for_all
        self.row = 0 if for_all else transport.rank
        self.takes_leftovers = not for_all or transport.rank == 0
        self.wire_bytes = 0

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`. An all-reduce works in place."""
        if self._for_all:
            return self._counted(self._transport.all_reduce(cells)), cells[0]
        total = self._workspace.take("cells_sum", (cells.shape[1],), cells.dtype)
        scratch = cells
        if self._transport.adds_itself(cells.device):
            scratch = self._workspace.take("cells_recv", tuple(cells.shape), cells.dtype)
        return self._counted(self._transport.sum_rows(total, cells, scratch)), total

    def sum_counts(self, counts: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.sum_counts`."""
        return self._counted(self._transport.all_reduce(counts, in_flight=True))

    def gather(self, values: Tensor) -> Tensor:
        """See :meth:`tagc.codecs.Exchange.gather`."""
        gathered, sent = self._transport.gather_values(values)
        self.wire_bytes += sent
        return gathered

    def _counted(self, work: CollectiveWork) -> CollectiveWork:
        self.wire_bytes += work.wire_bytes
        return work


class Broadcast:
    """An all-gather of messages. If ranks share hosts it has two levels: each rank gets the
    messages of the ranks with its own place on all hosts, and the ranks of a host forward them.

    Attributes:
        transports: the transports that this rank uses, the one between hosts last.
        inside_bytes: bytes sent so far to ranks of the same host.
    """

    def __init__(
        self, workspace: Workspace, across: Transport, inside: Transport | None = None
    ) -> None:
        self._workspace, self._across, self._inside = workspace, across, inside
        self.transports = (across,) if inside is None else (inside, across)
        self.inside_bytes = 0

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """Gather every rank's ``message`` ``[1, n]`` to its row of ``received`` ``[W, n]``; row
        ``h * R + r`` is from the ``r``-th rank of host ``h``.

        Returns:
            The work between hosts, with its bytes. Wait for it.
        """
        if self._inside is None:
            return self._across.gather(received, message)
        shape = (self._across.size, message.shape[1])
        rows = self._workspace.take("across_recv", shape, message.dtype)
        work = self._across.gather(rows, message)
        work.wait()
        self.share(received, rows)
        return work

    def send_across(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """Gather between hosts only: ``message`` ``[1, n]`` of the rank with this one's place on
        host ``h`` to ``received[h]`` ``[n]``. ``message`` may be a view of its row."""
        return self._across.gather(received, message)

    def share(self, out: Tensor, rows: Tensor) -> None:
        """Gather the rows of the ranks of a host to ``out`` ``[H * R, n]``.

        Args:
            rows: this rank's rows ``[H, n]``; row ``h`` becomes row ``h * R + r`` of ``out``.
        """
        if self._inside is None:
            out.copy_(rows)
            return
        hosts = out.view(self._across.size, self._inside.size, -1)
        work = self._inside.gather_each(hosts, rows)
        work.wait()
        self.inside_bytes += work.wire_bytes
