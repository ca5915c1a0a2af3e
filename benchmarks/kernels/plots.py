"""The results as plots: time over size, and the share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..figure import Curve, Panel, draw
from ..records import Record
from .registry import OURS
from .table import measured

_CHOSEN = ("symbol", "bits", "code")  # older records have no code


def plots(results: Sequence[Record], folder: Path) -> list[Path]:
    """Write the plots that the results have data for."""
    kept = list({(r.get("device"), r["case"]): r for r in measured(results)}.values())
    if not kept:
        return []
    return [
        draw(over_size(kept), folder / "kernels-time.png"),
        draw([_fractions(kept)], folder / "kernels-fraction.png", height=1 + 0.2 * len(kept)),
    ]


def over_size(results: Sequence[Record]) -> list[Panel]:
    """Time over size, a panel for each operator and density, for the dtypes, symbol, bits and code
    that most sizes were measured with."""
    kinds: dict[tuple, list[Record]] = {}
    for r in results:
        kind = tuple(r.get(key) for key in ("op", "density", "gradient", "residual", *_CHOSEN))
        kinds.setdefault(kind, []).append(r)
    most: dict[tuple, list[Record]] = {}
    for kind, records in kinds.items():
        if len(records) > len(most.get(kind[:2], [])):
            most[kind[:2]] = sorted(records, key=lambda r: r["numel"])
    return [
        Panel(
            title=op if density is None else f"{op}, density {density:.0%}",
            x="elements",
            y="ms",
            curves=_contenders(records),
            log="xy",
        )
        for (op, density), records in sorted(most.items(), key=str)
    ]


def _contenders(records: Sequence[Record]) -> list[Curve]:
    curves = []
    for name in dict.fromkeys(n for r in records for n in r["contenders"]):
        said = [(r["numel"], r["contenders"].get(name, {})) for r in records]
        points = [(numel, result["ms"]) for numel, result in said if "ms" in result]
        wrong = any(result.get("wrong") for _, result in said)
        label = f"{name} (result wrong)" if wrong else name
        style = {"lw": 2.5} if name == OURS else {"ls": ":" if wrong else "-"}
        x, y = [numel for numel, _ in points], [ms for _, ms in points]
        curves.append(Curve(label=label, x=x, y=y, style=style))
    sizes, copies = [r["numel"] for r in records], [r["copy_ms"] for r in records]
    floor = {"ls": "--", "color": "black"}
    return [*curves, Curve(label="copy of the floor's bytes", x=sizes, y=copies, style=floor)]


def _fractions(results: Sequence[Record]) -> Panel:
    """Share of the copy bandwidth that ours reaches, case by case."""
    shown = [r for r in results if not r["contenders"][OURS]["wrong"]][::-1]
    fractions = [r["contenders"][OURS]["fraction"] for r in shown]
    curve = Curve(label=OURS, x=fractions, y=[r["case"] for r in shown], style={"ls": ""})
    return Panel(x="floor's bytes per second, as a fraction of a copy's", y="", curves=[curve])
