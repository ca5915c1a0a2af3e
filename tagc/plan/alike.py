"""Merges rows of a plan whose names differ only in numbers, such as those of equal blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tagc.plan.table import Row


def merged(rows: Sequence[Row]) -> list[Row]:
    """Merge equal rows into one, in the place of the first. Its bytes are their sums.

    ``layers.0.wq`` to ``layers.31.wq`` become ``layers.{0–31}.wq``, experts of all blocks
    ``layers.{0–31}.experts.{0–7}.w1``. If some combinations of the numbers are missing, rows are
    merged only if they share all but the first number. DDP's units are sets of parameters that cut
    through blocks, named after the first, so rows of these are merged over units, and lose theirs.
    """
    names = {row.param for row in rows}
    rows = [replace(row, unit="") if row.unit in names else row for row in rows]
    done: dict[Row, Row] = {}
    for together in _grouped(rows, numbers=None):
        if _is_product([_numbers(row.param) for row in together]):
            done[together[0]] = _one(together)
            continue
        for fewer in _grouped(together, numbers=1):
            done[fewer[0]] = _one(fewer)
    return [done[row] for row in rows if row in done]


def _grouped(rows: Sequence[Row], numbers: int | None) -> list[list[Row]]:
    """Groups of rows that differ at most in the first ``numbers`` numbers of their names; None for
    all numbers."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        sizes = (f"{size:.9g}" for size in (row.dense_bytes, row.wire_bytes, row.stored_bytes))
        param = _with(row.param, itertools.repeat("*"), numbers)
        key = (
            param,
            _unit(row, param),
            row.direction,
            row.shape,
            row.role,
            row.codec,
            row.why_dense,
        )
        groups.setdefault((*key, row.density, *sizes), []).append(row)
    return list(groups.values())


def _one(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    columns = zip(*(_numbers(row.param) for row in rows), strict=True)
    names = [_ranges(sorted(set(column))) for column in columns]
    param = _with(rows[0].param, iter(names), None)
    total = {
        name: sum(getattr(row, name) for row in rows)
        for name in ("dense_bytes", "wire_bytes", "stored_bytes")
    }
    return replace(rows[0], param=param, unit=_unit(rows[0], param), alike=len(rows), **total)


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if _is_number(part))


def _is_number(part: str) -> bool:
    """Whether a part of a name is a number of at most 18 digits; Python refuses thousands."""
    return part.isdecimal() and len(part) <= 18


def _with(name: str, words: Iterator[str], numbers: int | None) -> str:
    """``name`` with ``words`` for its first ``numbers`` numbers; None for all numbers."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if _is_number(part)]
    for i, word in zip(places[:numbers], words, strict=False):
        parts[i] = word
    return ".".join(parts)


def _unit(row: Row, param: str) -> str:
    """The unit's name with the numbers of ``param``, if the parameter's name begins with it."""
    if not f"{row.param}.".startswith(f"{row.unit}."):
        return row.unit
    return ".".join(param.split(".")[: row.unit.count(".") + 1])


def _is_product(numbers: Sequence[tuple[int, ...]]) -> bool:
    columns = zip(*numbers, strict=True)
    return math.prod(len(set(column)) for column in columns) == len(numbers)


def _ranges(numbers: Sequence[int]) -> str:
    """``{0–3,7}`` for 0, 1, 2, 3, 7; a single number without braces."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        *_, last = first, *_ = [number for _, number in run]
        ranges.append(str(first) if first == last else f"{first}–{last}")
    return f"{{{','.join(ranges)}}}"
