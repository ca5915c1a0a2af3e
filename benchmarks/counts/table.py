"""Counts as Markdown; importing this needs no Triton."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..records import Record, markdown
from .compare import key

CAVEAT = (
    "Counted from machine code, not measured. Shares are of a copy that moves the bytes that any "
    "implementation must, and leave out latency, bank conflicts, cache misses, uneven programs and "
    "the time of launches, which has a column of its own."
)


def table(records: Iterable[Record]) -> str:
    """One row for every operator, its shares on every machine; then its kernels on one. Where two
    files have records of the same, the first file beside the second."""
    records = list(records)
    first: dict[tuple[str, ...], Record] = {}
    last: dict[tuple[str, ...], Record] = {}
    for record in records:
        first.setdefault(key(record), record)
        last.pop(key(record), None)  # in the order of the second file
        last[key(record)] = record
    if len(last) < len(records):
        return beside(last.values(), (r for k, r in first.items() if r is not last[k]))
    counted = [r for r in records if "share_of_copy" in r]
    machines = list(dict.fromkeys(r["machine"] for r in counted))
    if not counted:
        return "nothing was counted"
    parts = [CAVEAT, _operators(counted, machines)]
    shown = "H100" if "H100" in machines else machines[0]
    parts += [f"By kernel, {shown}:", _kernels([r for r in counted if r["machine"] == shown])]
    steps = [r for r in records if "policy" in r]
    if steps:
        parts += [_STEPS.format(**steps[0]), _policies(steps)]
    return "\n\n".join(parts)


def _operators(records: Sequence[Record], machines: Sequence[str]) -> str:
    cases: dict[str, dict[str, Record]] = {}
    for record in records:
        cases.setdefault(record["case"], {})[record["machine"]] = record
    shown = "H100" if "H100" in machines else machines[0]
    head = ["operator", *(f"share on {m}" for m in machines), "bytes / must", "instructions",
            "launches", "their µs", "atomics"]  # fmt: skip
    rows = []
    for case, by_machine in cases.items():
        one = by_machine.get(shown) or next(iter(by_machine.values()))
        shares = [
            f"{100 * by_machine[m]['share_of_copy']:.0f}%" if m in by_machine else ""
            for m in machines
        ]
        ratio = one["bytes"] / one["floor_bytes"]
        rows.append(
            [case, *shares, f"{ratio:.2f}", f"{one['per_element']:.1f}", one["launches"],
             f"{one['launch_microseconds']:.0f}", _short(one["atomics"])]
        )  # fmt: skip
    return markdown(head, rows)


def _kernels(records: Sequence[Record]) -> str:
    head = ["operator", "kernel", "launches", "programs", "registers", "occupancy", "MB",
            "atomics", "instructions", "µs", "bound by", "share of time"]  # fmt: skip
    rows = []
    for record in records:
        for name, k in record["kernels"].items():
            rows.append(
                [record["case"], name, k["launches"], k["programs"], k["registers"],
                 f"{100 * k['occupancy']:.0f}%", f"{k['bytes'] / 1e6:.0f}", _short(k["atomics"]),
                 f"{k['per_element']:.2f}", f"{k['microseconds']:.0f}", k["bound"],
                 f"{100 * k['share_of_time']:.0f}%"]
            )  # fmt: skip
    return markdown(head, rows)


def beside(records: Iterable[Record], before: Iterable[Record]) -> str:
    """What every operator and every policy's step was before, and is now, on H100.

    A kernel that takes a tenth of the operator's time or more is named with what bounds it.
    """
    records, old = list(records), list(before)
    counts = {r["case"]: r for r in old if r.get("machine") == "H100"}
    rows = []
    for now in (r for r in records if r.get("machine") == "H100"):
        was = counts.get(now["case"])
        bounds = [
            f"{name}: {k['bound']}" for name, k in now["kernels"].items()
            if k["share_of_time"] >= _WORTH_NAMING
        ]  # fmt: skip
        row: list[object] = [now["case"]]
        for said in (
            lambda r: f"{100 * r['share_of_copy']:.0f}%", lambda r: f"{r['per_element']:.1f}",
            lambda r: f"{r['bytes'] / r['floor_bytes']:.2f}", lambda r: str(r["launches"]),
        ):  # fmt: skip
            row += ["" if was is None else said(was), said(now)]
        rows.append([*row, ", ".join(bounds)])
    head = ["operator", "share before", "now", "instructions before", "now", "bytes / must before",
            "now", "launches before", "now", "bound by, now"]  # fmt: skip
    parts = [CAVEAT, markdown(head, rows)]
    policies = {r["policy"]: r for r in old if "policy" in r}
    steps = [r for r in records if "policy" in r]
    if policies and steps:
        found = [
            [r["policy"], *(p.get(k, "") for k in ("launches_per_block", "launches_per_step")
                            for p in (policies.get(r["policy"], {}), r))]
            for r in steps
        ]  # fmt: skip
        head = ["policy", "launches of a block before", "now", "of a step before", "now"]
        parts += [_STEPS.format(**steps[0]), markdown(head, found)]
    return "\n\n".join(parts)


_WORTH_NAMING = 0.1
_STEPS = (
    "Launches of a step of a model of {parameters:.2g} parameters in {blocks} blocks, bfloat16, on "
    "{ranks} ranks, by the codecs; torch's own kernels among them:"
)


def _policies(records: Sequence[Record]) -> str:
    head = ["policy", "launches of a block", "of them torch's", "of a step"]
    return markdown(
        head,
        (
            [r["policy"], r["launches_per_block"], r["kernels_per_block"].get("torch", 0),
             r["launches_per_step"]]
            for r in records
        ),
    )  # fmt: skip


def _short(n: int) -> str:
    return f"{n / 1e6:.1f} M" if n >= 1e5 else str(n)
