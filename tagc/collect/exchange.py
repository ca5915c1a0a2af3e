"""The codecs' exchanges besides messages."""

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
        return self._counted(self._transport.all_reduce(counts, in_flight=True))

    def gather(self, values: Tensor) -> Tensor:
        gathered, sent = self._transport.gather_values(values)
        self.wire_bytes += sent
        return gathered

    def _counted(self, work: CollectiveWork) -> CollectiveWork:
        self.wire_bytes += work.wire_bytes
        return work
