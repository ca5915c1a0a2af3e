"""Rearranges FSDP1's flat gradient so that segments are columns.

:mod:`tagc.plan.param_slices` says which elements go where. Elements in no segment (padding and
frozen parameters) are dropped on the way in and come out as zeros. The cost is a copy of the buffer
on the way in, and one of the shard on the way out.
"""

from __future__ import annotations

from tagc.ops.launches import ByRank, Pieces
from tagc.plan.param_slices import filled_columns, is_whole, param_slices
from tagc.plan.unit_plan import UnitPlan

# Elements that are contiguous both in FSDP's row and in ours: first in each, and how many.
_Copy = tuple[int, int, int]


def is_rearranged(unit: UnitPlan) -> bool:
    flat = unit.info.flat is not None and bool(unit.compressed)
    return flat and not is_whole(unit.info, unit.segments[0].params)


def arranging(unit: UnitPlan) -> Pieces:
    """``(gradient [W, S], rows [W, columns])``."""
    assert unit.info.flat is not None
    S = unit.info.flat.columns
    unused = [
        (slice(row, row + 1), slice(segment.start + used, segment.stop))
        for segment in unit.segments
        for row, used in enumerate(filled_columns(unit.info, segment.params))
        if used < segment.columns
    ]
    pieces = [
        (row * S + start, row * S + start + n, slice(row, row + 1), slice(column, column + n))
        for row, copies in enumerate(_copies(unit))
        for start, column, n in copies
    ]
    return Pieces(tuple(pieces), tuple(unused))


def restoring(unit: UnitPlan) -> ByRank:
    """``(shard [1, columns], out [1, S])``, of every rank."""
    assert unit.info.flat is not None
    everything = ((slice(None), slice(None)),)
    ranks = []
    for copies in _copies(unit):
        pieces = [(a, a + n, slice(0, 1), slice(column, column + n)) for a, column, n in copies]
        gaps = sum(n for _, _, n in copies) < unit.info.flat.columns
        ranks.append(Pieces(tuple(pieces), everything if gaps else (), back=True))
    return ByRank(tuple(ranks))


def _copies(unit: UnitPlan) -> list[list[_Copy]]:
    rows: list[list[_Copy]] = [[] for _ in range(unit.info.world_size)]
    for segment in unit.segments:
        for piece in param_slices(unit.info, segment.params):
            row, column, length = rows[piece.row], segment.start + piece.column, piece.length
            start, at, n = row[-1] if row else (0, 0, 0)
            if n and (start + n, at + n) == (piece.start, column):  # it continues the last one
                row[-1] = start, at, n + length
            else:
                row.append((piece.start, column, length))
    return rows
