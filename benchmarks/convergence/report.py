"""Table and pictures of convergence, from its records alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tagc.plots import pyplot, save

from ..records import Record, markdown
from .methods import BASELINES

_FAMILIES = {"adam": "#0072b2", "average": "#d55e00"}


@dataclass(frozen=True, kw_only=True)
class Best:
    """A method at its best learning rate.

    Attributes:
        records: a seed each, at that rate.
        rates: all that were tried.
    """

    name: str
    family: str
    rate: float
    rates: tuple[float, ...]
    records: tuple[Record, ...]

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(r["loss"] for r in self.records)

    @property
    def bits(self) -> float:
        """Per compressed element, after the warm-up."""
        return self.records[0]["bits"]

    @property
    def at_an_end(self) -> bool:
        """Whether the sweep ended before it found a rate between two worse ones."""
        return self.rate in (self.rates[0], self.rates[-1])


def table(results: Sequence[Record]) -> str:
    """A table for each model and length of training."""
    parts = []
    for title, records in _settings(results).items():
        found = _bests(records)
        dense = {family: _named(found, name) for family, name in BASELINES.items()}
        rows = []
        for best in sorted(found, key=lambda b: (-b.bits, b.loss)):
            spread = [r["loss"] for r in best.records]
            rows.append(
                [
                    best.name,
                    f"{best.bits:.2f}",
                    f"{best.records[0]['bits_with_warmup']:.2f}",
                    _parameter_bits(best),
                    f"{best.rate:g}{'*' if best.at_an_end else ''}",
                    f"{best.loss:.4f}",
                    f"{max(spread) - min(spread):.4f}" if len(spread) > 1 else "",
                    len(spread),
                    _gap(best, dense[best.family]),
                    _gap(best, dense["adam"]),
                ]
            )
        head = ["bits", "with warm-up", "of parameters", "rate", "loss", "range", "seeds"]
        gaps = ["to the family's dense", "to dense Adam"]
        parts.append(f"{title}\n\n" + markdown(["method", *head, *gaps], rows))
    return "\n\n".join(parts)


def plots(results: Sequence[Record], folder: Path) -> list[Path]:
    """Two pictures: loss against bits per element, loss against steps."""
    settings = _settings(results)
    return [
        _picture(settings, folder / "convergence-bits.png", _draw_bits),
        _picture(settings, folder / "convergence-steps.png", _draw_steps),
    ]


def _settings(results: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by what must be equal to compare them."""
    found: dict[str, list[Record]] = {}
    for r in sorted(results, key=lambda r: (r["parameters"], r["run"]["ranks"], r["run"]["steps"])):
        run = r["run"]
        title = (
            f"{r['parameters'] / 1e6:.2f} M parameters, {run['ranks']} ranks of {run['batch']} × "
            f"{run['context']} bytes, {run['steps']} steps"
        )
        found.setdefault(title, []).append(r)
    return found


def _bests(records: Sequence[Record]) -> list[Best]:
    """Every method at the rate with the least loss of the first seed."""
    found = []
    for name in dict.fromkeys(r["method"] for r in records):
        mine = [r for r in records if r["method"] == name]
        swept = {r["run"]["rate"]: r["loss"] for r in mine if r["run"]["seed"] == 0}
        finished = {rate: loss for rate, loss in swept.items() if loss is not None}
        if not finished:
            continue
        rate = min(finished, key=lambda rate: finished[rate])
        at_rate = [r for r in mine if r["run"]["rate"] == rate and r["loss"] is not None]
        found.append(
            Best(
                name=name,
                family=mine[0]["family"],
                rate=rate,
                rates=tuple(sorted(swept)),
                records=tuple(at_rate),
            )
        )
    return found


def _named(found: Sequence[Best], name: str) -> Best | None:
    return next((best for best in found if best.name == name), None)


def _parameter_bits(best: Best) -> str:
    """Of the messages about parameters, where they are compressed."""
    bits = best.records[0].get("parameter_bits")
    return "" if bits is None else f"{bits:.2f}"


def _gap(best: Best, dense: Best | None) -> str:
    """Over the seeds that both have."""
    if dense is None:
        return ""
    losses, reference = ({r["run"]["seed"]: r["loss"] for r in b.records} for b in (best, dense))
    seeds = losses.keys() & reference.keys()
    ratio = sum(losses[s] for s in seeds) / sum(reference[s] for s in seeds)
    return "" if best is dense else f"{ratio - 1:+.2%}"


def _picture(settings: dict[str, list[Record]], file: Path, draw: Any) -> Path:
    figure, axes = pyplot().subplots(
        1, len(settings), figsize=(6 * len(settings), 4.5), layout="constrained", squeeze=False
    )
    for axis, (title, records) in zip(axes[0], settings.items(), strict=True):
        axis.set_title(title, fontsize=9)
        axis.set_ylabel("validation loss (nats per byte)")
        draw(axis, _bests(records))
    return save(figure, file)


def _draw_bits(axis: Any, found: Sequence[Best]) -> None:
    for family, colour in _FAMILIES.items():
        dense = _named(found, BASELINES[family])
        if dense is not None:
            axis.axhline(dense.loss, color=colour, ls="--", lw=1, label=dense.name)
    for best in found:
        if best.name in BASELINES.values():
            continue
        colour = _FAMILIES[best.family]
        axis.plot(best.bits, best.loss, "o", color=colour, ms=4)
        axis.annotate(best.name, (best.bits, best.loss), fontsize=6, xytext=(4, 3),
                      textcoords="offset points")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xlabel("bits per compressed element")
    axis.legend(fontsize=7)


def _draw_steps(axis: Any, found: Sequence[Best]) -> None:
    for i, best in enumerate(sorted(found, key=lambda b: b.loss)):
        losses = best.records[0]["losses"]
        style = "k--" if best.name in BASELINES.values() else "-"
        # The first part is alike for all, and would hide the rest.
        steps = [int(s) for s in losses][1:]
        label = f"{best.name} ({best.bits:.2f} bits)"
        axis.plot(steps, list(losses.values())[1:], style, lw=1, label=label, zorder=-i)
    axis.set_xlabel("steps")
    axis.legend(fontsize=6)
