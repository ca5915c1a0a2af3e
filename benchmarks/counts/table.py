"""Counts as Markdown; importing this needs no Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..records import Record, markdown

CAVEAT = (
    "Counted from machine code, not measured. Shares are of a copy that moves the bytes that any "
    "implementation must, and leave out latency, bank conflicts, cache misses, uneven programs and "
    "the time of launches."
)
STEPS = (
    "Launches of a step of a model of {parameters:.2g} parameters in {blocks} blocks, bfloat16, on "
    "{ranks} ranks, by the codecs; torch's own kernels among them:"
)
_WORTH_NAMING = 0.1
# What stands twice in a table: before and now.
_OF_CASES: dict[str, Callable[[Record], object]] = {
    "share": lambda r: f"{100 * r['share_of_copy']:.0f}%",
    "instructions": lambda r: f"{r['per_element']:.1f}",
    "bytes / must": lambda r: f"{r['bytes'] / r['floor_bytes']:.2f}",
    "launches": lambda r: r["launches"],
}
_OF_STEPS: dict[str, Callable[[Record], object]] = {
    "launches of a block": lambda r: r["launches_per_block"],
    "of a step": lambda r: r["launches_per_step"],
}


def table(records: Iterable[Record]) -> str:
    """What each operator moves and executes. Where two files have records of the same, the first
    file's stand beside the second's; else each kernel has a row, too."""
    before: dict[str, Record] = {}
    now: dict[str, Record] = {}
    for record in records:
        key = key_of(record)
        if key in now:
            before[key] = now.pop(key)  # so that rows are in the second file's order
        now[key] = record
    cases = [r for r in now.values() if "case" in r]
    steps = [r for r in now.values() if "policy" in r]
    parts = [CAVEAT, _operators(cases, before)]
    if not before:
        parts += ["By kernel:", _kernels(cases)]
    if steps:
        head, rows = _beside("policy", steps, before, _OF_STEPS)
        parts += [STEPS.format(**steps[0]), markdown(head, rows)]
    return "\n\n".join(parts)


def key_of(record: Record) -> str:
    """What a record is about: an operator's case, or a policy's step."""
    return record.get("case") or record["policy"]


def _operators(cases: Sequence[Record], before: dict[str, Record]) -> str:
    """A kernel that takes a tenth of the operator's time or more is named with what bounds it."""
    head, rows = _beside("operator", cases, before, _OF_CASES)
    for row, case in zip(rows, cases, strict=True):
        named = {n: k for n, k in case["kernels"].items() if k["share_of_time"] >= _WORTH_NAMING}
        row.append(", ".join(f"{name}: {k['bound']}" for name, k in named.items()))
    return markdown([*head, "bound by, now" if before else "bound by"], rows)


def _beside(
    name: str,
    records: Sequence[Record],
    before: dict[str, Record],
    columns: dict[str, Callable[[Record], object]],
) -> tuple[list[str], list[list[object]]]:
    """Head and rows; where records have others before them, each column twice: before and now."""
    head = [name]
    rows: list[list[object]] = [[key_of(record)] for record in records]
    for column, say in columns.items():
        head += [f"{column} before", "now"] if before else [column]
        for row, record in zip(rows, records, strict=True):
            was = before.get(key_of(record))
            row += ["" if was is None else say(was)] if before else []
            row.append(say(record))
    return head, rows


def _kernels(cases: Iterable[Record]) -> str:
    head = ["operator", "kernel", "launches", "registers", "MB", "instructions", "µs", "bound by",
            "share of time"]  # fmt: skip
    return markdown(
        head,
        (
            [r["case"], name, k["launches"], k["registers"], f"{k['bytes'] / 1e6:.0f}",
             f"{k['per_element']:.2f}", f"{k['microseconds']:.0f}", k["bound"],
             f"{100 * k['share_of_time']:.0f}%"]
            for r in cases
            for name, k in r["kernels"].items()
        ),
    )  # fmt: skip
