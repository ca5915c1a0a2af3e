"""The results as a table and as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..figure import Curve, Panel, draw
from ..records import Record, markdown
from .measure import OURS


def table(results: Sequence[Record]) -> str:
    """A row per case: ours, its share of the copy bandwidth, and the others beside it.

    Beside each other contender's time stands how many times faster ours is, or, where that would
    compare with a wrong result, a number that the notes below explain.
    """
    failed = [f"{r['case']} failed: {r['failed']}" for r in results if "failed" in r]
    measured = [r for r in results if "failed" not in r]
    others = [n for n in dict.fromkeys(n for r in measured for n in r["contenders"]) if n != OURS]
    reasons: dict[str, int] = {}

    def other(record: Record, name: str) -> str:
        result = record["contenders"].get(name)
        if result is None:
            return "-"
        refused = record["refused"].get(name)
        if refused is None:
            return f"{_ms(result)}, {record['speedup'][name]:.3g}×"
        return f"{_ms(result)} [{reasons.setdefault(refused, len(reasons) + 1)}]"

    rows = []
    for r in measured:
        mine = r["contenders"][OURS]
        # On a GPU the host's part is a matter of its own: launches.
        on_gpu = r.get("device") == "cuda" and "host_ms" in mine
        host = f" (host {mine['host_ms']:.3g} ms)" if on_gpu else ""
        floor, copy = f"{r['floor_bytes'] / 1e6:.1f} MB", f"{r['copy_gb_per_s']:.1f} GB/s"
        beside = [other(r, name) for name in others]
        share = f"{mine['fraction']:.2f}"
        rows.append([r["case"], floor, copy, _ms(mine) + host, share, *beside])
    to_others = (f"{name}; speed of {OURS} to it" for name in others)
    head = ["case", "floor", "copy", OURS, "of copy", *to_others]
    notes = [f"[{number}] no speedup: {why}" for why, number in reasons.items()]
    below = "  \n".join(notes + failed)
    return "\n\n".join([_machine(results), markdown(head, rows), below]).strip()


def _ms(result: Record) -> str:
    return f"{result['ms']:.3g} ms" if "ms" in result else "failed"


def _machine(results: Sequence[Record]) -> str:
    shown = ("date", "gpu", "processor", "device", "threads", "load", "timing", "torch", "triton")
    lines = {", ".join(f"{key} {r[key]}" for key in shown if key in r) for r in results}
    # The load differs from case to case; one line says enough.
    return min(lines)


def plots(results: Sequence[Record], folder: Path) -> list[Path]:
    """The share of the copy bandwidth that ours reaches, case by case."""
    measured = [r for r in results[::-1] if "failed" not in r]
    shares = {r["case"]: r["contenders"][OURS]["fraction"] for r in measured}
    if not shares:
        return []
    about = "floor's bytes per second, as a fraction of a copy's"
    points = [(share, case) for case, share in shares.items()]
    panel = Panel("", about, "", [Curve(OURS, points, {"ls": ""})])
    return [draw([panel], folder / "kernels-fraction.png", height=1 + 0.2 * len(shares))]
