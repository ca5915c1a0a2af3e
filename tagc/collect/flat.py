"""Rearranges FSDP1's flat gradient so that segments are columns.

:mod:`tagc.plan.param_slices` says which elements go where. The cost is a copy of the buffer on the
way in, and one of the shard on the way out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.plan import UnitPlan
from tagc.plan.param_slices import filled_columns, is_whole, param_slices


@dataclass(frozen=True)
class _Copy:
    """Elements that are contiguous both in FSDP's row and in ours."""

    start: int
    column: int
    length: int


class FlatRows:
    """Copies between FSDP1's rows ``[W, S]`` and those of a unit's plan, ``[W, columns]``.

    Elements in no segment (padding and frozen parameters) are dropped on the way in and come out as
    zeros.
    """

    def __init__(self, plan: UnitPlan, workspace: Workspace) -> None:
        assert plan.info.flat is not None
        W = plan.info.world_size
        self._columns, self._workspace = plan.columns, workspace
        self._copies: list[list[_Copy]] = [[] for _ in range(W)]
        self._unused: list[tuple[int, slice]] = []
        for segment in plan.segments:
            for piece in param_slices(plan.info, segment.params):
                column = segment.start + piece.column
                _append(self._copies[piece.row], _Copy(piece.start, column, piece.length))
            self._unused += [
                (row, slice(segment.start + used, segment.stop))
                for row, used in enumerate(filled_columns(plan.info, segment.params))
                if used < segment.columns
            ]
        S = plan.info.flat.columns
        self._has_gaps = [sum(copy.length for copy in row) < S for row in self._copies]

    def arrange(self, grad: Tensor) -> Tensor:
        """Copy ``grad`` ``[W, S]`` to the plan's rows ``[W, columns]``, a buffer that the next call
        overwrites."""
        rows = self._workspace.take("flat_grad", (len(grad), self._columns), grad.dtype)
        for row, columns in self._unused:
            rows[row, columns].zero_()
        _copy(
            [rows[r, c.column : c.column + c.length] for r, c in self._numbered()],
            [grad[r, c.start : c.start + c.length] for r, c in self._numbered()],
        )
        return rows

    def shard_buffer(self, dtype: torch.dtype) -> Tensor:
        """A buffer for a shard in the plan's columns, ``[columns]``."""
        return self._workspace.take("flat_shard", (self._columns,), dtype)

    def restore(self, shard: Tensor, out: Tensor, row: int) -> None:
        """Copy ``shard`` ``[columns]``, the shard of rank ``row``, to ``out`` ``[S]``."""
        if self._has_gaps[row]:
            out.zero_()
        copies = self._copies[row]
        _copy(
            [out[c.start : c.start + c.length] for c in copies],
            [shard[c.column : c.column + c.length] for c in copies],
        )

    def _numbered(self) -> list[tuple[int, _Copy]]:
        return [(row, copy) for row, copies in enumerate(self._copies) for copy in copies]


def flat_rows(plan: UnitPlan, workspace: Workspace) -> FlatRows | None:
    """The rearrangement of the unit's gradient; None if it needs none."""
    if plan.info.flat is None or not plan.compressed:
        return None
    if is_whole(plan.info, plan.segments[0].params):
        return None
    return FlatRows(plan, workspace)


def _append(row: list[_Copy], new: _Copy) -> None:
    """Add a copy; merge it with the last one if it continues that in both rows."""
    if row:
        last = row[-1]
        if last.start + last.length == new.start and last.column + last.length == new.column:
            row[-1] = _Copy(last.start, last.column, last.length + new.length)
            return
    row.append(new)


def _copy(to: list[Tensor], of: list[Tensor]) -> None:
    # One kernel on a GPU, instead of one per piece.
    if to:
        torch._foreach_copy_(to, of)
