"""The second of two shots: what the owners of slices added up, sent to all replicas."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tagc.codecs import CodecSetup, Coder
from tagc.plan import UnitPlan


class SecondShot:
    """An owner's message about the sum of its slice, and what moves between a shard ``[S]`` and
    its slices ``[N, C]``. See :mod:`tagc.plan.two_shots`.

    The owner takes the values that its own message carries, as everybody does: all replicas end
    with the same bits. What the message leaves out is in the owner's residual, ``[1, C]``.

    Attributes:
        plan: of the message.
        coder: of it.
    """

    def __init__(self, unit: UnitPlan, setup: CodecSetup) -> None:
        """New state.

        Args:
            unit: with two shots.
            setup: of the first one.
        """
        assert unit.shots is not None
        self.plan = unit.shots.gather
        self._workspace, self._dtype = setup.workspace, unit.info.dtype
        # Sums are not rounded before they are encoded.
        self._setup = replace(setup, destinations=1, dtype=torch.float32, stage=2)
        self._pieces: list[_Piece] = []
        self._empty: list[tuple[slice, slice]] = []
        at = column = 0
        for cut in (cut for of_segment in unit.shots.cuts for cut in of_segment):
            self._add(at, column, cut.columns, cut.length)
            at, column = at + cut.columns, column + cut.length
        self.reset()

    def reset(self, earlier_steps: int = 0) -> None:
        """Start anew, with empty residuals, after so many sums elsewhere."""
        self.coder = Coder(self.plan.segments, self._setup)
        self.coder.skip(earlier_steps)

    def arrange(self, shard: Tensor) -> Tensor:
        """The slices ``[N, C]`` of ``shard`` ``[1, S]`` or ``[S]``, until the next call."""
        rows = self._rows(self._dtype)
        for owners, columns in self._empty:
            rows[owners, columns].zero_()
        flat = shard.view(-1)
        pairs = [(p.of_rows(rows), p.of_shard(flat)) for p in self._pieces]
        # One kernel on a GPU, instead of one a piece.
        torch._foreach_copy_([row for row, _ in pairs], [piece for _, piece in pairs])
        return rows

    def slice_sum(self) -> Tensor:
        """Room for what this rank adds up, ``[C]`` float32."""
        return self._workspace.take("slice_sum", (self.plan.columns,), torch.float32)

    def encode(self, total: Tensor, message: Tensor) -> None:
        """Write the message ``[1, words]`` int32 about ``total`` ``[C]``."""
        self.coder.encode_rows(total[None], message)

    def decode(self, received: Tensor, out: Tensor) -> None:
        """Write what all owners' messages ``[N, words]`` int32 carry to ``out`` ``[S]``."""
        rows = self._rows(torch.float32)
        self.coder.decode_rows(received, rows)
        flat = out.view(-1)
        pairs = [(p.of_shard(flat), p.of_rows(rows)) for p in self._pieces]
        torch._foreach_copy_([piece for piece, _ in pairs], [row for _, row in pairs])

    def _rows(self, dtype: torch.dtype) -> Tensor:
        return self._workspace.take("slices", (self.plan.sources, self.plan.columns), dtype)

    def _add(self, at: int, column: int, columns: int, length: int) -> None:
        """The pieces of neighbouring columns that are cut into slices."""
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
        if used < self.plan.sources:
            self._empty.append((slice(used, None), slice(column, column + length)))


class _Piece:
    """Elements that lie side by side in the shard, and are whole slices, or a part of one."""

    def __init__(self, start: int, owners: slice, columns: slice) -> None:
        self._owners, self._columns = owners, columns
        self._shape = (owners.stop - owners.start, columns.stop - columns.start)
        self._elements = slice(start, start + self._shape[0] * self._shape[1])

    def of_rows(self, rows: Tensor) -> Tensor:
        """Its place in the slices."""
        return rows[self._owners, self._columns]

    def of_shard(self, shard: Tensor) -> Tensor:
        """Its place in the shard."""
        return shard[self._elements].view(self._shape)
