"""The copy of a unit's parameters that changes are added to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tagc.collect.gatherer import GatherSetup, gather_coder
from tagc.plan import Segment

# Columns that take less time than another launch.
_GAP = 1 << 16


class HostCopy:
    """A unit's parameters as of the last exchange. The ranks of a host share one copy.

    All ranks that keep a row, including its owner, compute it from the same messages with the same
    arithmetic: ``row <- round(row + q * s)`` in segments of changes, the decoded values in others.
    So they all have the same bits.

    Attributes:
        rows: ``[H, S]`` in the dtype that FSDP gathers; row ``h`` is the shard of rank
            ``h * R + r``, where ``r`` is this rank's place on its host.
        own: the row of this rank's own shard.
    """

    def __init__(self, setup: GatherSetup, own: int) -> None:
        plan, shape = setup.plan, (setup.plan.peers, setup.plan.columns)
        self.rows = torch.zeros(shape, dtype=plan.info.dtype, device=setup.device)
        self.own = own
        self._workspace = setup.workspace
        self._coder = gather_coder(setup)
        self._frozen = {segment.start for segment in plan.segments if segment.frozen}
        self._spans = _joined(s for s in plan.segments if s.codec.of_changes)

    def encode(self, shard: Tensor, message: Tensor, row: int | None = None) -> None:
        """Write the message about ``shard`` ``[S]`` to ``message`` ``[1, words]`` int32.

        Args:
            row: the row of the copy that the shard is compared with; by default :attr:`own`.
        """
        known = self.rows[self.own if row is None else row]
        changes = self._workspace.take("changes", (1, shard.numel()), torch.float32)
        for span in self._spans:
            changes[0, span].copy_(shard[span]).sub_(known[span])
        for codec in self._coder.codecs.values():
            (part,) = codec.parts
            columns = part.columns
            if part.plan.of_changes:
                if columns.start in self._frozen:
                    # A mask's infinities do not change, but their difference would be NaN.
                    changes[0, columns].masked_fill_(shard[columns] == known[columns], 0.0)
                codec.encode_rows(changes, message)
            else:
                codec.encode_rows(shard[None], message)

    def decode(self, received: Tensor, rows: Tensor) -> None:
        """Update ``rows`` ``[n, S]`` with the messages ``[n, words]`` int32 about them."""
        self._coder.decode_rows(received, rows)


def _joined(segments: Iterable[Segment]) -> list[slice]:
    """The columns of segments, with short gaps between them, such as norms."""
    spans: list[slice] = []
    for segment in segments:
        first = segment.start
        if spans and first - spans[-1].stop <= _GAP:
            first = spans.pop().start
        spans.append(slice(first, segment.stop))
    return spans
