"""The rows of the table that a plan prints, and texts of tables."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of the plan, or several equal ones. Bytes are what a rank sends in a step, or
    stores.

    Attributes:
        why_dense: why it is not compressed; empty if it is.
        alike: how many parameters the row stands for.
    """

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


_HEAD = ("unit", "parameter", "×", "shape", "role", "codec", "density")
_BYTES = ("dense", "wire", "stored")
_LEFT = {"unit", "parameter", "shape", "role", "codec", "why dense"}


def as_text(head: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """The first line, the notes, then a table for each direction."""
    directions = list(dict.fromkeys(row.direction for row in rows))
    lines = [head, *(f"- {note}" for note in notes)]
    for direction in directions:
        if len(directions) > 1:
            lines += ["", direction]
        lines += _table([row for row in rows if row.direction == direction])
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    in_units = any(row.unit for row in rows)
    merged = any(row.alike > 1 for row in rows)
    explained = any(row.why_dense for row in rows)
    left_out = {*(() if in_units else ("unit",)), *(() if merged else ("×",))}
    head = tuple(name for name in (*_HEAD, *_BYTES) if name not in left_out)
    head += ("why dense",) if explained else ()
    body = [
        (
            *([r.unit] if in_units else []),
            r.param,
            *([str(r.alike) if r.alike > 1 else ""] if merged else []),
            "×".join(map(str, r.shape)) or "scalar",
            r.role,
            r.codec,
            f"{r.density:g}" if r.density < 1 else "",
            format_bytes(r.dense_bytes),
            format_bytes(r.wire_bytes),
            format_bytes(r.stored_bytes) if r.stored_bytes else "",
            *([r.why_dense] if explained else []),
        )
        for r in rows
    ]
    sums = (_sum(rows, f"{name}_bytes") for name in _BYTES)
    before = len(head) - len(_BYTES) - 1 - explained
    total = ("total", *[""] * before, *map(format_bytes, sums), *([""] if explained else []))
    lines = aligned((head, *body, total), [i for i, name in enumerate(head) if name in _LEFT])
    widths = [max(map(len, column)) for column in zip(head, *body, total, strict=True)]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """The lines of a table.

    Args:
        left: the columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(getattr(row, name) for row in rows)


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
