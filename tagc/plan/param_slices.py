"""Locates a parameter's elements in a unit's rows.

FSDP2 cuts every parameter into as many parts as there are ranks, so it has the same columns in each
row of the buffer. FSDP1 lays its parameters end to end and cuts the whole: a parameter is in a few
rows, in different columns of each, and may continue in the next row. There, a segment collects each
row's elements of its parameters. It has as many columns as the fullest row needs, and zeros fill
the others::

    FSDP1's buffer      segment of a and c    segment of b
     a a a a b           a a a a               b 0
     b b c c -           c c 0 0               b b
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tagc.plan.units import UnitInfo, UnitParam


@dataclass(frozen=True, kw_only=True)
class ParamSlice:
    """Elements ``offset`` to ``offset + length`` of a flattened parameter, in the row of the rank
    that owns them, from ``column`` of the segment on, and from ``start`` of a row of FSDP's buffer
    on (for FSDP2 the same)."""

    param: str
    offset: int
    length: int
    row: int
    column: int
    start: int


def is_whole(info: UnitInfo, params: Sequence[UnitParam]) -> bool:
    """Whether a segment of these parameters is FSDP1's buffer itself."""
    return info.flat is not None and info.flat.whole and len(params) == len(info.params)


def columns_of(info: UnitInfo, params: Sequence[UnitParam]) -> int:
    if info.flat is None:
        return sum(param.columns for param in params)
    if is_whole(info, params):
        return info.flat.columns
    return max(filled_columns(info, params), default=0)


def param_slices(info: UnitInfo, params: Sequence[UnitParam]) -> Iterator[ParamSlice]:
    """The non-empty pieces of a segment's parameters in a flat buffer, parameter by parameter and
    row by row."""
    assert info.flat is not None
    S, whole = info.flat.columns, is_whole(info, params)
    used = [0] * info.world_size
    for param in params:
        assert param.start is not None
        end = param.start + math.prod(param.shape)
        at = param.start
        while at < end:
            row, start = divmod(at, S)
            length = min(end - at, S - start)
            yield ParamSlice(
                param=param.name,
                offset=at - param.start,
                length=length,
                row=row,
                column=start if whole else used[row],
                start=start,
            )
            used[row] += length
            at += length


def filled_columns(info: UnitInfo, params: Sequence[UnitParam]) -> list[int]:
    """How many columns of a segment of these parameters each row uses; the rest is padding."""
    columns = [0] * info.world_size
    for piece in param_slices(info, params):
        columns[piece.row] = max(columns[piece.row], piece.column + piece.length)
    return columns
