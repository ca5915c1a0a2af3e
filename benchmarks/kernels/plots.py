"""The results as plots: time over size, and the share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tagc.plots import pyplot, save

from ..records import Record
from .registry import OURS
from .table import measured

_CHOSEN = ("symbol", "bits", "code")  # older records have no code


def plots(results: Sequence[Record], folder: Path) -> list[Path]:
    """Write the plots that the results have data for."""
    kept = _latest(measured(results))
    if not kept:
        return []
    drawn = [_over_size(kept, folder / "kernels-time.png")]
    drawn.append(_fractions(kept, folder / "kernels-fraction.png"))
    return drawn


def _latest(results: Sequence[Record]) -> list[Record]:
    return list({(r.get("device"), r["case"]): r for r in results}.values())


def _over_size(results: list[Record], file: Path) -> Path:
    """Time over size for the dtypes, symbol, bits and code that most sizes were measured with."""

    def kind(r: Record) -> tuple:
        return tuple(r.get(key) for key in ("op", "gradient", "residual", "density", *_CHOSEN))

    sizes: dict[tuple, set[int]] = {}
    for r in results:
        sizes.setdefault(kind(r), set()).add(r["numel"])
    most: dict[tuple, tuple] = {}
    for k, found in sizes.items():
        panel = (k[0], k[3])
        if panel not in most or len(found) > len(sizes[most[panel]]):
            most[panel] = k
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(most), figsize=(4.2 * len(most), 3.8), squeeze=False, sharey=True
    )
    for axis, ((op, density), chosen) in zip(axes[0], sorted(most.items(), key=str), strict=True):
        records = sorted((r for r in results if kind(r) == chosen), key=lambda r: r["numel"])
        for name in dict.fromkeys(n for r in records for n in r["contenders"]):
            points = [
                (r["numel"], r["contenders"][name]["ms"])
                for r in records
                if "ms" in r["contenders"].get(name, {})
            ]
            wrong = any(r["contenders"].get(name, {}).get("wrong") for r in records)
            style = {"lw": 2.5} if name == OURS else {"ls": ":" if wrong else "-", "lw": 1.2}
            label = f"{name} (result wrong)" if wrong else name
            axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=label, **style)
        floor = [(r["numel"], r["copy_ms"]) for r in records]
        axis.plot(*zip(*floor, strict=True), "k--", lw=1, label="copy of the floor's bytes")
        axis.set(xscale="log", yscale="log", xlabel="elements")
        axis.set_title(op if density is None else f"{op}, density {density:.0%}", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms")
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return save(figure, file)


def _fractions(results: list[Record], file: Path) -> Path:
    """Share of the copy bandwidth that ours reaches, case by case."""
    plt = pyplot()
    shown = [r for r in results if not r["contenders"][OURS]["wrong"]]
    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.2 * max(1, len(shown))))
    names = [r["case"] for r in shown][::-1]
    axis.barh(names, [r["contenders"][OURS]["fraction"] for r in shown][::-1], height=0.7)
    axis.axvline(1, color="k", ls="--", lw=1)
    axis.tick_params(axis="y", labelsize=6)
    axis.set_xlabel("floor's bytes per second, as a fraction of a copy's")
    axis.grid(axis="x", alpha=0.3)
    return save(figure, file)
