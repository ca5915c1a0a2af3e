"""An all-reduce of a shard in two shots: a reduce-scatter of its slices, and an all-gather of the
owners' sums. See :mod:`tagc.plan.two_shots`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tagc.basics.profiled import profiled
from tagc.codecs import Codec, Coder
from tagc.codecs.feedback import SegmentFeedback
from tagc.collect.part import Part
from tagc.collect.set_aside import Debt
from tagc.collect.stage import Call, MessageRows, Messages, ReduceMessages, StageSetup
from tagc.plan import UnitPlan


class TwoShots(Messages):
    """``[1, S]`` to ``[S]`` through slices ``[N, C]``. Each of the ``N`` replicas owns one slice.

    The owner, too, uses the values in its own message, so all replicas end with the same bits. Its
    residual ``[1, C]`` keeps what the message leaves out.
    """

    owner_coder: Coder

    def __init__(self, setup: StageSetup) -> None:
        """Start with empty state. The unit's plan must have two shots."""
        super().__init__(setup)
        shots = setup.unit.shots
        assert shots is not None
        self._reduce = ReduceMessages(shots.reduce, setup)
        self.coder = self._reduce.coder
        self._plan, self._rows = shots.gather, MessageRows(shots.gather, setup)
        # Sums are not rounded before they are encoded.
        codec = replace(setup.codec, destinations=1, dtype=torch.float32, stage=2)
        self.owner_coder = Coder(self._plan.segments, codec)
        self._slices = Slices(setup.unit, setup)

    def running(self, rows: Tensor, out: Tensor, call: Call) -> Iterator[None]:
        take = self._setup.workspace.take
        total = take("slice_sum", (self._plan.columns,), torch.float32)
        yield from self._reduce.running(self._slices.arrange(rows), total, call)
        with profiled("second shot", self._name):
            # Ranks that were in lockstep in the first shot are so in the second: it has no stamps.
            send, received = self._rows.take()
            self.owner_coder.encode_rows(total[None], send)
            work = call.transport.gather(received, send)
            yield
            work.wait()
            self._counters.message_bytes += work.wire_bytes
            slices = self._slices.room(torch.float32)
            self.owner_coder.decode_rows(received, slices)
            self._slices.restore(slices, out)

    @property
    def feedbacks(self) -> Mapping[int, SegmentFeedback]:
        return self._in_unit(self.coder)

    @property
    def owner_feedbacks(self) -> Mapping[int, SegmentFeedback]:
        return self._in_unit(self.owner_coder)

    def debts(self, part: Part, rank: int) -> list[Debt]:
        unit = self._setup.unit
        mask = part.missing_mask(self._setup.codec.device).to(unit.info.dtype)
        rows = self._slices.arrange(mask).bool()
        feedbacks, owner_feedbacks = self.feedbacks, self.owner_feedbacks
        debts = []
        for slices, whole in zip(self._plan.segments, unit.segments, strict=True):
            of = rows[:, slices.start : slices.stop]
            debts.append(Debt(feedbacks[whole.start], of, of[rank]))
            debts.append(Debt(owner_feedbacks[whole.start], of[rank : rank + 1], of[rank]))
        return debts

    def memory(self) -> Iterator[tuple[str, Codec]]:
        yield from self._reduce.memory()
        yield from ((f"second_shot.{name}", c) for name, c in self.owner_coder.codecs.items())

    def skip(self, steps: int) -> None:
        self.coder.skip(steps)
        self.owner_coder.skip(steps)

    def _in_unit(self, coder: Coder) -> dict[int, SegmentFeedback]:
        """The coder's feedbacks, by first column in the unit instead of in a slice."""
        feedbacks = coder.feedbacks
        pairs = zip(self._plan.segments, self._setup.unit.segments, strict=True)
        return {whole.start: feedbacks[part.start] for part, whole in pairs}


class Slices:
    """Moves elements between a shard ``[S]`` and its slices ``[N, C]``."""

    def __init__(self, unit: UnitPlan, setup: StageSetup) -> None:
        assert unit.shots is not None
        self._shape = (unit.peers, unit.shots.gather.columns)
        self._workspace, self._dtype = setup.workspace, unit.info.dtype
        self._pieces: list[_Piece] = []
        self._empty: list[tuple[slice, slice]] = []
        at = column = 0
        for cut in (cut for of_segment in unit.shots.cuts for cut in of_segment):
            self._add(at, column, cut.columns, cut.length)
            at, column = at + cut.columns, column + cut.length

    def room(self, dtype: torch.dtype) -> Tensor:
        """A buffer for slices, valid until the next call."""
        return self._workspace.take("slices", self._shape, dtype)

    def arrange(self, shard: Tensor) -> Tensor:
        """Copy ``shard`` ``[1, S]`` or ``[S]`` to slices ``[N, C]``, valid until the next call."""
        rows = self.room(self._dtype)
        for owners, columns in self._empty:
            rows[owners, columns].zero_()
        flat = shard.view(-1)
        pairs = [(p.of_rows(rows), p.of_shard(flat)) for p in self._pieces]
        # One kernel on a GPU, instead of one per piece.
        torch._foreach_copy_([row for row, _ in pairs], [piece for _, piece in pairs])
        return rows

    def restore(self, rows: Tensor, out: Tensor) -> None:
        """Copy slices ``[N, C]`` to ``out`` ``[S]``."""
        flat = out.view(-1)
        pairs = [(p.of_shard(flat), p.of_rows(rows)) for p in self._pieces]
        torch._foreach_copy_([piece for piece, _ in pairs], [row for _, row in pairs])

    def _add(self, at: int, column: int, columns: int, length: int) -> None:
        """Add the pieces of one cut: ``columns`` from column ``at`` of the shard, ``length`` in
        each slice from its ``column``."""
        if not columns:
            return
        full, rest = divmod(columns, length)
        if full:
            self._pieces.append(_Piece(at, slice(0, full), slice(column, column + length)))
        if rest:
            last = slice(column, column + rest)
            self._pieces.append(_Piece(at + full * length, slice(full, full + 1), last))
            self._empty.append((slice(full, full + 1), slice(column + rest, column + length)))
        used = full + (rest > 0)
        if used < self._shape[0]:
            self._empty.append((slice(used, None), slice(column, column + length)))


class _Piece:
    """Contiguous elements of the shard that fill some columns of one or more slices."""

    def __init__(self, start: int, owners: slice, columns: slice) -> None:
        self._owners, self._columns = owners, columns
        self._shape = (owners.stop - owners.start, columns.stop - columns.start)
        self._elements = slice(start, start + self._shape[0] * self._shape[1])

    def of_rows(self, rows: Tensor) -> Tensor:
        """A view of the piece in the slices."""
        return rows[self._owners, self._columns]

    def of_shard(self, shard: Tensor) -> Tensor:
        """A view of the piece in the shard."""
        return shard[self._elements].view(self._shape)
