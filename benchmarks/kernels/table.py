"""The results as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records import Record, markdown
from .registry import OURS


def table(results: Sequence[Record]) -> str:
    """A row per case: ours, its share of the copy bandwidth, and the others beside it.

    Beside each other contender's time stands how many times faster ours is, or, where that would
    compare with a wrong result, a number that the notes below explain.
    """
    failed = [f"{r['case']} failed: {r['failed']}" for r in results if "failed" in r]
    machine, results = _machine(results), measured(results)
    others = [n for n in dict.fromkeys(n for r in results for n in r["contenders"]) if n != OURS]
    reasons: dict[str, int] = {}

    def other(record: Record, name: str) -> str:
        result = record["contenders"].get(name)
        if result is None:
            return "-"
        said = record["refused"].get(name)
        if said is None:
            return f"{_ms(result)}, {_times(record['speedup'][name])}"
        return f"{_ms(result)} [{reasons.setdefault(said, len(reasons) + 1)}]"

    def ours(record: Record) -> str:
        mine = record["contenders"][OURS]
        return "**wrong**" if mine["wrong"] else f"{mine['fraction']:.2f}"

    def time_of_ours(record: Record) -> str:
        mine = record["contenders"][OURS]
        # On a GPU the host's part is a matter of its own: launches.
        host = f" (host {mine['host_ms']:.3g} ms)" if record.get("device") == "cuda" else ""
        return _ms(mine) + (host if "host_ms" in mine else "")

    rows = [
        [
            record["case"], f"{record['floor_bytes'] / 1e6:.1f} MB",
            f"{record['copy_gb_per_s']:.1f} GB/s", time_of_ours(record), ours(record),
            *(other(record, name) for name in others),
        ]
        for record in results
    ]  # fmt: skip
    to_others = (f"{name}; speed of {OURS} to it" for name in others)
    head = ["case", "floor", "copy", OURS, "of copy", *to_others]
    notes = [f"[{number}] no speedup: {why}" for why, number in reasons.items()]
    return "\n\n".join([machine, markdown(head, rows), "  \n".join(notes + failed)]).strip()


def measured(results: Sequence[Record]) -> list[Record]:
    """Without the cases that failed."""
    return [r for r in results if "failed" not in r]


def _ms(result: dict[str, Any]) -> str:
    return f"{result['ms']:.3g} ms" if "ms" in result else "failed"


def _times(x: float) -> str:
    return f"{x:.3g}×"


def _machine(results: Sequence[Record]) -> str:
    shown = ("date", "gpu", "processor", "device", "threads", "load", "timing", "torch", "triton")
    lines = {
        ", ".join(f"{key} {record[key]}" for key in shown if key in record) for record in results
    }
    # The load differs from case to case; one line says enough.
    return min(lines)
