"""Formats a plan as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tagc.plan.row import Row

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
    widths = [max(map(len, column)) for column in zip(head, *body, total, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if name in _LEFT else cell.rjust(w)
            for name, cell, w in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in (head, tuple("-" * w for w in widths), *body, total)
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
