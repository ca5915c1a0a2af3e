"""Counts as Markdown; importing this needs no Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def table(records: Iterable[Record]) -> str:
    """What each operator moves and executes. Where two files have records of the same, the first
    file's stand beside the second's; else the shares on all machines, and what each kernel does."""
    before: dict[tuple[str, ...], Record] = {}
    now: dict[tuple[str, ...], Record] = {}
    for record in records:
        key = key_of(record)
        if key in now:
            before[key] = now.pop(key)  # so that rows are in the second file's order
        now[key] = record
    cases = [r for r in now.values() if r.get("machine") == "H100"]
    steps = [r for r in now.values() if "policy" in r]
    parts = [CAVEAT]
    if before:
        parts.append(_beside(cases, before))
    else:
        parts += [_shares(cases, now), "By kernel, H100:", _kernels(cases)]
    if steps:
        parts += [STEPS.format(**steps[0]), _launches(steps, before)]
    return "\n\n".join(parts)


def key_of(record: Record) -> tuple[str, ...]:
    """What a record is about."""
    if "policy" in record:
        return ("step", record["policy"])
    return (record["machine"], record["case"])


def _share(record: Record | None) -> str:
    return "" if record is None else f"{100 * record['share_of_copy']:.0f}%"


def _instructions(record: Record) -> str:
    return f"{record['per_element']:.1f}"


def _ratio(record: Record) -> str:
    return f"{record['bytes'] / record['floor_bytes']:.2f}"


def _beside(cases: Iterable[Record], before: dict[tuple[str, ...], Record]) -> str:
    """Before and now; a kernel that takes a tenth of the operator's time or more is named with
    what bounds it."""
    said: tuple[Callable[[Record], object], ...] = (
        _share, _instructions, _ratio, lambda r: r["launches"],
    )  # fmt: skip
    rows = []
    for now in cases:
        was = before.get(key_of(now))
        row: list[object] = [now["case"]]
        for say in said:
            row += ["" if was is None else say(was), say(now)]
        bounds = (
            f"{name}: {k['bound']}" for name, k in now["kernels"].items()
            if k["share_of_time"] >= _WORTH_NAMING
        )  # fmt: skip
        rows.append([*row, ", ".join(bounds)])
    head = ["operator", "share before", "now", "instructions before", "now", "bytes / must before",
            "now", "launches before", "now", "bound by, now"]  # fmt: skip
    return markdown(head, rows)


def _shares(cases: Iterable[Record], now: dict[tuple[str, ...], Record]) -> str:
    machines = ("A100", "H100", "B200")
    head = ["operator", *(f"share on {m}" for m in machines), "bytes / must", "instructions",
            "launches"]  # fmt: skip
    return markdown(
        head,
        (
            [r["case"], *(_share(now.get((m, r["case"]))) for m in machines), _ratio(r),
             _instructions(r), r["launches"]]
            for r in cases
        ),
    )  # fmt: skip


def _kernels(cases: Iterable[Record]) -> str:
    head = ["operator", "kernel", "launches", "registers", "occupancy", "MB", "instructions", "µs",
            "bound by", "share of time"]  # fmt: skip
    return markdown(
        head,
        (
            [r["case"], name, k["launches"], k["registers"], f"{100 * k['occupancy']:.0f}%",
             f"{k['bytes'] / 1e6:.0f}", f"{k['per_element']:.2f}", f"{k['microseconds']:.0f}",
             k["bound"], f"{100 * k['share_of_time']:.0f}%"]
            for r in cases
            for name, k in r["kernels"].items()
        ),
    )  # fmt: skip


def _launches(steps: Iterable[Record], before: dict[tuple[str, ...], Record]) -> str:
    head = ["policy", "launches of a block", "of a step"]
    counted = ("launches_per_block", "launches_per_step")
    if not before:
        return markdown(head, ([r["policy"], *(r[k] for k in counted)] for r in steps))
    head = ["policy", "launches of a block before", "now", "of a step before", "now"]
    return markdown(
        head,
        (
            [r["policy"], *(p.get(k, "") for k in counted for p in (before.get(key_of(r), {}), r))]
            for r in steps
        ),
    )
