"""Tables and pictures of scaling, from its records alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tagc.plots import pyplot, save

from ..records import Record, markdown

_COLOURS = (
    "#555555", "#0072b2", "#56b4e9", "#000000", "#d55e00", "#009e73", "#cc79a7", "#e69f00",
)  # fmt: skip


def table(results: Sequence[Record]) -> str:
    """Bytes per element and unresolved keys of every codec, by density; then unions."""
    parts = []
    runs = _of(results, "codec")
    for density in sorted({r["density"] for r in runs}):
        of_density = [r for r in runs if r["density"] == density]
        worlds = sorted({r["world_size"] for r in of_density})
        names = list(dict.fromkeys(r["codec"] for r in of_density))
        rows = []
        for name in names:
            by_world = {r["world_size"]: r for r in of_density if r["codec"] == name}
            sizes = [by_world[w]["bytes_per_element_normalised"] for w in worlds]
            growth = f"{sizes[-1] / sizes[0] - 1:+.1%}"
            lost = [r["unresolved"] for r in by_world.values() if r["unresolved"] is not None]
            total = sum(r.get("keys", 0) for r in by_world.values())
            unresolved = f"{sum(lost)} of {total:,}" if lost else "-"
            rows.append([name, *(f"{size:.3f}" for size in sizes), growth, unresolved])
        head = [f"density {density:g}, bytes per element, by ranks", *worlds, "growth"]
        parts.append(markdown([*head, "unresolved keys"], rows))
    rows = []
    for r in _of(results, "union"):
        measured = {int(w): u for w, u in r["measured"].items()}
        far = r["extrapolated"]
        rows.append(
            [
                f"{r['density']:g}",
                r["group"],
                " / ".join(f"{measured[w]:.3f}" for w in measured),
                f"{r['misfit']:.1%}",
                f"{far['probit']:.3f} ({far['scale']:.3f} to {far['logistic']:.3f})",
            ]
        )
    worlds = " / ".join(next(iter(_of(results, "union")))["measured"])
    farthest = max(r["world_size"] for r in runs)
    head = [f"union density of {worlds} ranks, measured", "misfit", f"of {farthest}, extrapolated"]
    parts.append(markdown(["density", "group", *head], rows))
    return "\n\n".join(parts)


def plots(results: Sequence[Record], folder: Path) -> list[Path]:
    """One picture: bytes per element against ranks for each density, and union density."""
    plt = pyplot()
    runs, unions = _of(results, "codec"), _of(results, "union")
    densities = sorted({r["density"] for r in runs})
    width = 4.2 * (len(densities) + 1)
    figure, axes = plt.subplots(1, len(densities) + 1, figsize=(width, 4), layout="constrained")
    for axis, density in zip(axes, densities, strict=False):
        _draw_bytes(axis, [r for r in runs if r["density"] == density])
        axis.set_title(f"density {density:g}")
    axes[0].set_ylabel("bytes per element, without (W - 1) / W")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    _draw_unions(axes[-1], unions, max(r["world_size"] for r in runs))
    return [save(figure, folder / "scaling.png")]


def _draw_bytes(axis: Any, runs: Sequence[Record]) -> None:
    for colour, name in zip(_COLOURS, dict.fromkeys(r["codec"] for r in runs), strict=False):
        points = sorted(
            (r["world_size"], r["bytes_per_element_normalised"]) for r in runs if r["codec"] == name
        )
        style = "--" if name.endswith("shared") else "-"  # it lies on the line without
        axis.plot(*zip(*points, strict=True), style, marker=".", color=colour, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("ranks")
    axis.set_yscale("log")


def _draw_unions(axis: Any, unions: Sequence[Record], farthest: int) -> None:
    from .overlap import Overlap

    single = [r for r in unions if r["group"] == 1]
    worlds = [2**i for i in range(farthest.bit_length()) if 2**i <= farthest]
    for colour, r in zip(_COLOURS[1:], single, strict=False):
        density = r["density"]
        measured = {int(w): u for w, u in r["measured"].items()}
        axis.plot(list(measured), list(measured.values()), "o", color=colour, ms=4)
        bands = {}
        for link, spread in r["spread"].items():
            overlap = Overlap(density=measured[1], spread=spread, link=link)
            bands[link] = [overlap.union(w) for w in worlds]
        axis.plot(worlds, bands["probit"], color=colour, label=f"density {density:g}")
        axis.fill_between(worlds, bands["scale"], bands["logistic"], color=colour, alpha=0.15)
        independent = [1 - (1 - density) ** w for w in worlds]
        axis.plot(worlds, independent, ":", color=colour, lw=1)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("ranks (dots: measured; dotted: independent)")
    axis.set_ylabel("union density")
    axis.set_title("how supports overlap")
    axis.legend(fontsize=7)


def _of(results: Sequence[Record], kind: str) -> list[Record]:
    return [r for r in results if r["kind"] == kind]
