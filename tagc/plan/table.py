"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter of the plan; bytes are those that this rank sends in a step, or stores."""

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


_HEAD = ("unit", "parameter", "shape", "role", "codec", "density", "dense", "wire", "stored")
_LEFT = 5  # columns of text


def as_text(policy: str, rows: Sequence[Row], warmup_steps: int, notes: Sequence[str] = ()) -> str:
    """What is sent in all, the notes, then a table of each direction."""
    dense, wire = _sum(rows, "dense_bytes"), _sum(rows, "wire_bytes")
    directions = list(dict.fromkeys(row.direction for row in rows))
    what = "gradient" if directions in ([], ["gradients"]) else " and ".join(directions)
    ratio = f"{dense / wire:.2f}" if wire else "1.00"
    lines = [
        f"policy {policy}: a rank sends {format_bytes(wire)} of {what} per "
        f"step, {ratio} times less than dense ({format_bytes(dense)})"
        + (f", after {warmup_steps} dense steps" if warmup_steps else ""),
        *(f"- {note}" for note in notes),
    ]
    for direction in directions:
        if len(directions) > 1:
            lines += ["", direction]
        lines += _table([row for row in rows if row.direction == direction])
    return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    body = [
        (
            r.unit,
            r.param,
            "×".join(map(str, r.shape)) or "scalar",
            r.role,
            r.codec,
            f"{r.density:g}" if r.density < 1 else "",
            format_bytes(r.dense_bytes),
            format_bytes(r.wire_bytes),
            format_bytes(r.stored_bytes) if r.stored_bytes else "",
        )
        for r in rows
    ]
    sums = (_sum(rows, name) for name in ("dense_bytes", "wire_bytes", "stored_bytes"))
    total = ("total", *[""] * 5, *map(format_bytes, sums))
    widths = [max(map(len, column)) for column in zip(_HEAD, *body, total, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i < _LEFT else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (_HEAD, tuple("-" * w for w in widths), *body, total)
    ]


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(getattr(row, name) for row in rows)


def as_list(names: Sequence[str]) -> str:
    """Some of the names and how many more."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def format_bytes(n: float) -> str:
    """Bytes for people: 1234567 is '1.18 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"
