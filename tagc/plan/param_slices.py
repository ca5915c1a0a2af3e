"""Where a parameter's elements lie in a unit's rows.

FSDP2 cuts every parameter into as many parts as there are ranks, so that it has the same columns in
each row of the buffer. FSDP1 lays its parameters end to end and cuts the whole: a parameter lies in
few rows, in other columns of each, and may go on in the next. There a segment collects what each
row has of its parameters; the fullest row decides how many columns it has, and the others are
filled up with zeros::

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
    """Elements ``offset`` to ``offset + length`` of a flattened parameter.

    Attributes:
        row: rank that owns them.
        column: of the first one, in the segment.
        start: of the first one, in a row of FSDP1's buffer; in FSDP2's, the segment's own.
    """

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
    """Columns of a segment of these parameters, padding included."""
    if info.flat is None:
        return sum(param.columns for param in params)
    if is_whole(info, params):
        return info.flat.columns
    return max(filled_columns(info, params), default=0)


def param_slices(info: UnitInfo, params: Sequence[UnitParam]) -> Iterator[ParamSlice]:
    """The pieces of a segment's parameters, row by row within each of them; none is empty.

    For FSDP2 they are right for parameters that are sharded in their first dimension.
    """
    if info.flat is None:
        yield from _even(info, params)
        return
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
    """Columns of a segment of these parameters that each row uses: all that follow are padding."""
    columns = [0] * info.world_size
    for piece in param_slices(info, params):
        columns[piece.row] = max(columns[piece.row], piece.column + piece.length)
    return columns


def _even(info: UnitInfo, params: Sequence[UnitParam]) -> Iterator[ParamSlice]:
    column = 0
    for param in params:
        numel = math.prod(param.shape)
        for row in range(info.world_size):
            offset = row * param.columns
            length = min(param.columns, numel - offset)
            if length > 0:
                yield ParamSlice(
                    param=param.name,
                    offset=offset,
                    length=length,
                    row=row,
                    column=column,
                    start=column,
                )
        column += param.columns
