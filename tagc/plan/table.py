"""The rows of the table that a plan prints, merged if their names differ only in numbers, such as
those of equal blocks; and texts of tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter, or ``alike`` equal ones. Bytes are what a rank sends in a step, or stores.
    ``why_dense`` is empty if it is compressed."""

    direction: str
    unit: str
    param: str
    shape: tuple[int, ...]
    role: str
    codec: str
    density: float
    dense_bytes: float
    wire_bytes: float
    stored_bytes: float
    why_dense: str = ""
    alike: int = 1


_BYTES = ("dense", "wire", "stored")
_SIZES = tuple(f"{name}_bytes" for name in _BYTES)


def as_text(head: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    directions = list(dict.fromkeys(row.direction for row in rows))
    lines = [head, *(f"- {note}" for note in notes)]
    for direction in directions:
        if len(directions) > 1:
            lines += ["", direction]
        lines += _table([row for row in rows if row.direction == direction])
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    columns = {
        "unit": [row.unit for row in rows],
        "parameter": [row.param for row in rows],
        "×": [str(row.alike) if row.alike > 1 else "" for row in rows],
        "shape": ["×".join(map(str, row.shape)) or "scalar" for row in rows],
        "role": [row.role for row in rows],
        "codec": [row.codec for row in rows],
        "density": [f"{row.density:g}" if row.density < 1 else "" for row in rows],
        "dense": [format_bytes(row.dense_bytes) for row in rows],
        "wire": [format_bytes(row.wire_bytes) for row in rows],
        "stored": [format_bytes(row.stored_bytes) if row.stored_bytes else "" for row in rows],
        "why dense": [row.why_dense for row in rows],
    }
    for name in ("unit", "×", "why dense"):
        if not any(columns[name]):
            del columns[name]
    sums = {name: sum(getattr(row, f"{name}_bytes") for row in rows) for name in _BYTES}
    totals = [format_bytes(sums[name]) if name in sums else "" for name in columns]
    totals[0] = "total"
    head = list(columns)
    table = [head, *zip(*columns.values(), strict=True), totals]
    right = ("×", "density", *_BYTES)
    lines = aligned(table, [i for i, name in enumerate(head) if name not in right])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """The lines of a table; the columns ``left`` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def as_list(names: Sequence[str]) -> str:
    """The first two names, and how many more there are."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def format_bytes(n: float) -> str:
    """Bytes as text: 1234567 is '1.18 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


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
        columns = zip(*(_numbers(row.param) for row in together), strict=True)
        if math.prod(len(set(column)) for column in columns) == len(together):
            done[together[0]] = _one(together)
            continue
        for fewer in _grouped(together, numbers=1):
            done[fewer[0]] = _one(fewer)
    return [done[row] for row in rows if row in done]


def _grouped(rows: Sequence[Row], numbers: int | None) -> list[list[Row]]:
    """Groups of rows that differ at most in the first ``numbers`` numbers of their names (None: in
    all)."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        param = _with(row.param, itertools.repeat("*"), numbers)
        sizes = {name: float(f"{getattr(row, name):.9g}") for name in _SIZES}
        key = replace(row, param=param, unit=_unit(row, param), **sizes)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _one(rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    columns = zip(*(_numbers(row.param) for row in rows), strict=True)
    names = [_ranges(sorted(set(column))) for column in columns]
    param = _with(rows[0].param, iter(names), None)
    total = {name: sum(getattr(row, name) for row in rows) for name in _SIZES}
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


def _ranges(numbers: Sequence[int]) -> str:
    """``{0–3,7}`` for 0, 1, 2, 3, 7."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        *_, last = first, *_ = [number for _, number in run]
        ranges.append(str(first) if first == last else f"{first}–{last}")
    return f"{{{','.join(ranges)}}}"
