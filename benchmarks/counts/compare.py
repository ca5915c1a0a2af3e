"""What got worse since a record was taken."""

from __future__ import annotations

from collections.abc import Iterable

from ..records import Record

# By how much a count may grow: code of the same compiler varies with what surrounds it; another
# version of Triton schedules and unrolls differently.
INSTRUCTIONS, OTHER_COMPILER = 1.03, 1.25
BYTES = 1.01
# By how much a kernel may take more registers, and the share of a copy may fall.
REGISTERS, SHARE = 1.1, 0.02


def key(record: Record) -> tuple[str, ...]:
    """What a record is about."""
    if "policy" in record:
        return ("step", record["policy"])
    return (record["machine"], record["case"])


def worse(record: Record, before: Record) -> list[str]:
    """What got worse: launches, bytes, atomics, instructions for each element; by the compiler of
    the record also registers, occupancy and the share of a copy. Nothing if none did."""
    if "policy" in record:
        counted = ("launches_per_block", "launches_per_step")
        return [_said(record, before, k) for k in counted if record[k] > before[k]]
    same = record["triton"] == before["triton"]
    limits = {
        "launches": 1.0,
        "bytes": BYTES,
        "atomics": BYTES,
        "per_element": INSTRUCTIONS if same else OTHER_COMPILER,
    }
    found = [_said(record, before, k) for k, x in limits.items() if record[k] > x * before[k]]
    if not same:
        return found
    if record["share_of_copy"] < before["share_of_copy"] - SHARE:
        found.append(_said(record, before, "share_of_copy"))
    for name, now in record["kernels"].items():
        then = before["kernels"].get(name, now)
        fuller = now["registers"] > REGISTERS * then["registers"]
        if fuller or now["occupancy"] < then["occupancy"]:
            numbers = (f"{k} {then[k]} -> {now[k]}" for k in ("registers", "occupancy"))
            found.append(f"{' '.join(key(record))}: {name}: {', '.join(numbers)}")
    return found


def _said(record: Record, before: Record, field: str) -> str:
    return f"{' '.join(key(record))}: {field} {before[field]} -> {record[field]}"


def all_worse(records: Iterable[Record], before: Iterable[Record]) -> list[str]:
    """The same for many records; one that was not there before is a complaint, too."""
    known = {key(r): r for r in before}
    found: list[str] = []
    for record in records:
        if key(record) not in known:
            found.append(f"{' '.join(key(record))}: not in the record")
        else:
            found += worse(record, known[key(record)])
    return found
