"""What codecs send besides their messages, and the all-gather of messages on one or two levels."""

from __future__ import annotations

from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect.transport import CollectiveWork, Transport


class Exchange:
    """The exchange of one reduction, over one transport. See :class:`tagc.codecs.Exchange`.

    Attributes:
        wire_bytes: sent so far, messages not counted.
    """

    def __init__(self, transport: Transport, workspace: Workspace, *, for_all: bool) -> None:
        """New counts.

        Args:
            for_all: whether this is an all-reduce, one message for everybody, and everybody decodes
                the same row; else a reduce-scatter, in which every rank owns a row.
        """
        self._transport, self._workspace, self._for_all = transport, workspace, for_all
        self.row = 0 if for_all else transport.rank
        self.takes_leftovers = not for_all or transport.rank == 0
        self.wire_bytes = 0

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        """See :meth:`tagc.codecs.Exchange.sum_cells`; in an all-reduce in place."""
        if self._for_all:
            return self._counted(self._transport.all_reduce(cells)), cells[0]
        total = self._workspace.take("cells_sum", (cells.shape[1],), cells.dtype)
        scratch = self._workspace.take("cells_recv", tuple(cells.shape), cells.dtype)
        return self._counted(self._transport.sum_rows(total, cells, scratch)), total

    def sum_counts(self, counts: Tensor) -> CollectiveWork:
        """See :meth:`tagc.codecs.Exchange.sum_counts`."""
        return self._counted(self._transport.all_reduce(counts))

    def gather(self, values: Tensor) -> Tensor:
        """See :meth:`tagc.codecs.Exchange.gather`."""
        gathered, sent = self._transport.gather_values(values)
        self.wire_bytes += sent
        return gathered

    def _counted(self, work: CollectiveWork) -> CollectiveWork:
        self.wire_bytes += work.wire_bytes
        return work


class Broadcast:
    """An all-gather of messages. Where ranks share hosts it has two levels: each rank gets those
    of the ranks with its own place on all hosts, and the ranks of a host hand them on.

    Attributes:
        transports: that this rank sends anything by, the one between hosts last.
        inside_bytes: sent so far to ranks of the same host.
    """

    def __init__(self, across: Transport, inside: Transport | None = None) -> None:
        self._across, self._inside = across, inside
        self.transports = (across,) if inside is None else (inside, across)
        self.inside_bytes = 0

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """``message`` ``[1, n]`` of every rank to its row of ``received`` ``[W, n]``, on two
        levels at once: row ``h * R + r`` is of the ``r``-th rank of host ``h``.

        Returns:
            The work, with the bytes to other hosts.
        """
        if self._inside is None:
            return self._across.gather(received, message)
        hosts = received.view(self._across.size, self._inside.size, -1)
        work = self._across.gather_to_rows(hosts[:, self._inside.rank].unbind(), message[0])
        work.wait()
        self._hand_on(hosts, self._inside)
        return work

    def send_across(self, received: Tensor, message: Tensor) -> CollectiveWork:
        """Likewise, between hosts only: ``message`` ``[1, n]`` of the rank with this one's place on
        host ``h`` to ``received[h]`` ``[n]``, where it may lie already."""
        return self._across.gather(received, message)

    def share(self, out: Tensor, rows: Tensor) -> None:
        """Write what the ranks of a host have between them to ``out`` ``[H * R, n]``.

        Args:
            rows: ``[H, n]``, those of this rank: its ``h`` is row ``h * R + r`` of ``out``.
        """
        if self._inside is None:
            out.copy_(rows)
            return
        hosts = out.view(self._across.size, self._inside.size, -1)
        hosts[:, self._inside.rank] = rows
        self._hand_on(hosts, self._inside)

    def _hand_on(self, hosts: Tensor, inside: Transport) -> None:
        """Tell the neighbours what this rank has of every host in ``hosts`` ``[H, R, n]``, in
        place, as they do."""
        own = inside.rank
        works = [inside.gather(rows, rows[own : own + 1]) for rows in hosts]
        for work in works:
            work.wait()
            self.inside_bytes += work.wire_bytes
