"""Tables of training losses, from the records alone.

Records name their methods, so those of methods that no longer exist are shown, too.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..records import Record, markdown
from .methods import DENSE, LINES
from .settings import SETTINGS

_DENSE = DENSE.name


def table(records: Sequence[Record]) -> str:
    """The tables of all comparisons that have records."""
    made = {"sweep": _sweep_table, "paired": _paired_table, "untuned": _untuned_table}
    made |= {"pretrained": _pretrained_table, "gpu": _gpu_table, "exact": _exact_table}
    found = {name: [r for r in records if r["comparison"] == name] for name in made}
    return "\n\n".join(made[name](mine) for name, mine in found.items() if mine)


def _grouped(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def _by_setting(records: Sequence[Record], unit: str = "bytes") -> dict[str, list[Record]]:
    """Records that may be compared, by a title."""

    def title(r: Record) -> str:
        run = r["run"]
        sizes = f"{r['parameters'] / 1e6:.2f} M parameters, {run['ranks']} ranks of {run['batch']}"
        text = f", seed {run['seed']}; {r['text']}" if "text" in r else ""
        return f"{sizes} × {run['context']} {unit}, {run['steps']} steps{text}"

    order = sorted(records, key=lambda r: (r["parameters"], r["run"]["ranks"], r["run"]["steps"]))
    return _grouped(order, title)


def _sweep_table(records: Sequence[Record]) -> str:
    """One table for each model and length of training: every method at the rate with the least loss
    of the first seed. A star marks the first or the last rate that was tried."""
    head = ["method", "bits", "of parameters", "rate", "loss", "range", "seeds", "to dense"]
    parts = []
    for title, mine in _by_setting(records).items():
        best: dict[str, list[Record]] = {}
        ends: dict[str, tuple[float, float]] = {}
        for name, of_method in _grouped(mine, lambda r: r["method"]).items():
            rates = {r["run"]["rate"]: r["loss"] for r in of_method if r["run"]["seed"] == 0}
            if finished := {rate: loss for rate, loss in rates.items() if loss is not None}:
                rate = min(finished, key=finished.__getitem__)
                ends[name] = min(rates), max(rates)
                best[name] = [r for r in of_method if r["run"]["rate"] == rate and r["loss"]]
        dense = _by_seed(best.get(_DENSE, []))
        rows = []
        for name, found in best.items():
            losses, rate = _by_seed(found), found[0]["run"]["rate"]
            parameters, mean = found[0].get("parameter_bits"), statistics.fmean(losses.values())
            seeds = losses.keys() & dense.keys() if name != _DENSE else ()
            gap = sum(losses[s] for s in seeds) / sum(dense[s] for s in seeds) - 1 if seeds else 0
            spread = f"{max(losses.values()) - min(losses.values()):.4f}"
            row = [name, f"{found[0]['bits']:.2f}"]
            row.append("" if parameters is None else f"{parameters:.2f}")
            row += [f"{rate:g}{'*' if rate in ends[name] else ''}", f"{mean:.4f}"]
            row += [spread if len(losses) > 1 else "", len(losses), f"{gap:+.2%}" if seeds else ""]
            rows.append((-found[0]["bits"], mean, row))
        rows.sort(key=lambda row: row[:2])
        parts.append(f"{title}\n\n" + markdown(head, (row for *_, row in rows)))
    return "\n\n".join(parts)


def _by_seed(records: Iterable[Record]) -> dict[int, float]:
    return {r["run"]["seed"]: math.inf if r["loss"] is None else r["loss"] for r in records}


# What differs between the runs of one setting; the rest of a run's key says which setting it is.
_VARIED = ("policy", "ddp", "powersgd", "rate", "seed", "kept", "gathered")


def _paired_table(records: Sequence[Record]) -> str:
    """A row for each line in a setting: the difference from dense, in percent of its loss, ± half
    of the 95% interval, and the number of pairs; ``=`` where dense lies in the interval."""
    settings = {
        _setting_key(s.run(DENSE, 0.0, 0, kept=False).key): s.name for s in SETTINGS.values()
    }
    names: dict[str, str] = {method: line for line, method in LINES.items()}
    found = _grouped(records, lambda r: _setting_key(r["run"]))
    rows: list[list[object]] = []
    for key in dict.fromkeys((*settings, *found)):
        dense_runs = [r for r in found.get(key, []) if r["method"] == _DENSE]
        swept = [r for r in dense_runs if r["run"]["seed"] == 0 and r["loss"]]
        if not swept:
            continue
        run = min(swept, key=lambda r: r["loss"])["run"]
        mine = [r for r in found[key] if r["run"]["rate"] == run["rate"]]
        dense = _by_seed(r for r in mine if r["method"] == _DENSE)
        tokens = run["ranks"] * run["batch"] * run["context"]
        about = [settings.get(key, "other"), f"{tokens:,}", run["steps"], f"{run['rate']:g}"]
        mean = statistics.fmean(dense.values())
        rows.append([*about, _DENSE, f"{mean:.4f} ({len(dense)})"])

        def line(r: Record) -> str:
            method: str = r["method"]
            name = names.get(method, method.removeprefix("dense, "))
            return name if r["run"].get("kept") else f"{name}, rates not kept"

        lines = _grouped((r for r in mine if r["method"] != _DENSE), line)
        # A line without kept rates comes right behind the same with them.
        order = (name + kept for name in LINES for kept in ("", ", rates not kept"))
        for name in dict.fromkeys((*order, *lines)):
            gap = difference(_by_seed(lines.get(name, [])), dense)
            if gap is not None:
                rows.append(["", "", "", "", name, gap.marked(str(gap))])
    return markdown(["setting", "tokens a step", "steps", "rate", "line", "to dense"], rows)


def _setting_key(run: Record) -> str:
    return json.dumps({k: v for k, v in run.items() if k not in _VARIED}, sort_keys=True)


def _untuned_table(records: Sequence[Record]) -> str:
    """A row for a policy with its settings: means over seeds."""

    def setting(r: Record) -> tuple[str, float, float, bool]:
        run = r["run"]
        return r["method"], run["rate"], run.get("clip", 1.0), run.get("kept", False)

    dense = {r["run"]["seed"]: r for r in records if r["method"] == _DENSE}
    rows = []
    for (name, rate, clip, kept), mine in _grouped(records, setting).items():
        losses = [r["loss"] for r in mine]
        pairs = [(r, dense[r["run"]["seed"]]) for r in mine if r["run"]["seed"] in dense]
        gaps = [r["loss"] / d["loss"] - 1 for r, d in pairs]
        clipped = [sum(n > clip for n in r["norms"]) / len(r["norms"]) for r in mine]
        row = [name, f"{rate:g}{' kept' if kept else ''}", f"{clip:g}"]
        row += [f"{statistics.fmean(losses):.4f}", f"{max(losses) - min(losses):.4f}", len(losses)]
        row.append(f"{statistics.fmean(gaps):+.1%}" if gaps and name != _DENSE else "")
        row.append(f"{statistics.fmean(_norm_ratio(*p) for p in pairs):.2f}" if pairs else "")
        rows.append([*row, f"{statistics.fmean(clipped):.0%}"])
    head = ["policy", "rate", "clip", "loss", "range", "seeds", "to dense", "norm", "clipped"]
    return markdown(head, rows)


def _norm_ratio(record: Record, dense: Record) -> float:
    """Mean norm of the gradients to dense's, in the second half of the steps, past any warm-up."""
    half = len(record["norms"]) // 2
    return statistics.fmean(record["norms"][half:]) / statistics.fmean(dense["norms"][half:])


def _pretrained_table(records: Sequence[Record]) -> str:
    """A row for each line: means over seeds, and differences from dense in the same units, ± half
    of the 95% interval, and of each seed; ``=`` where zero lies in the interval."""
    head = ["line", "bits", "of parameters", "MRR", "to dense", "each", "recall at 1", "to dense"]
    parts = []
    for title, mine in _by_setting(records, "tokens").items():
        before = [f"{1 - mine[0]['before']:.4f}", "", "", f"{mine[0]['recall'][0]:.4f}", ""]
        rows: list[list[object]] = [["before", "", "", *before]]
        lines = _grouped(mine, lambda r: r["method"])
        dense = _scores(lines.get(_DENSE, []))
        for name, of_line in lines.items():
            row: list[object] = [name, f"{of_line[0]['bits']:.2f}"]
            row.append(f"{of_line[0].get('parameter_bits', 32):.2f}")
            for score, beside in zip(_scores(of_line), dense, strict=True):
                gaps = [score[s] - beside[s] for s in sorted(score.keys() & beside.keys())]
                row += [f"{statistics.fmean(score.values()):.4f}", "", ""]
                if gaps and name != _DENSE:
                    found = _interval(gaps)
                    half = f" ± {found.half:.4f}" if found.pairs > 1 else ""
                    row[-2] = found.marked(f"{found.mean:+.4f}{half} ({found.pairs})")
                    row[-1] = ", ".join(f"{gap:+.4f}" for gap in gaps)
            rows.append(row[:-1])
        about = f"{mine[0]['pairs']} pairs to train on, {mine[0]['run']['windows']} held out"
        parts.append(f"{title}, {about}\n\n" + markdown(head, rows))
    return "\n\n".join(parts)


def _scores(records: Sequence[Record]) -> tuple[dict[int, float], dict[int, float]]:
    """MRR and recall at the end, by seed."""
    mrr = {seed: 1 - loss for seed, loss in _by_seed(records).items()}
    return mrr, {r["run"]["seed"]: r["recall"][1] for r in records}


def _gpu_table(records: Sequence[Record]) -> str:
    """A column for each line: losses by step, and how far they are from dense's."""
    parts = []
    for title, found in _by_setting(records, "tokens").items():
        mine = {r["method"]: r for r in found}
        dense = mine.get(DENSE.name, {"losses": {}, "loss": None})
        bits = ([r["bits"], r.get("parameter_bits")] for r in mine.values())
        shown = (", ".join(f"{b:.2f}" for b in both if b is not None) for both in bits)
        rows: list[list[object]] = [["bits", *shown]]
        for step in found[0]["losses"]:
            losses = [r["losses"].get(step) for r in mine.values()]
            rows.append([step, *(_beside(loss, dense["losses"].get(step)) for loss in losses)])
        rows.append(["end", *(_beside(r["loss"], dense["loss"]) for r in mine.values())])
        rows.append(["ms a step", *(r["step_ms"] for r in mine.values())])
        parts.append(f"{title}\n\n" + markdown(["step", *mine], rows))
    return "\n\n".join(parts)


def _exact_table(records: Sequence[Record]) -> str:
    """A row for each rate; how many times fewer bytes than FSDP2's own gathers, which are two a
    step, and one without ``reshard_after_forward``."""
    rows = []
    for r in records:
        mean, run = statistics.fmean(r["bits"]), r["run"]
        after = f", after {run['after']:g}" if "after" in run else ""
        times = (f"{r[name] / mean:.1f}×" for name in ("native_bits", "native_bits_kept"))
        worst = f"{max(r['bits']):.2f}"
        rows.append([f"{run['rate']:g}{after}", run["steps"], f"{mean:.2f}", worst, *times])
    head = ["rate", "steps", "mean bits", "worst", "fewer bytes", "without reshard"]
    run, numel = records[0]["run"], records[0]["parameters"] / 1e6
    about = f"{numel:.2f} M parameters, {run['ranks']} ranks of {run['batch']} × {run['context']}"
    return f"{about} bytes\n\n{markdown(head, rows)}"


def _beside(loss: float | None, dense: float | None) -> str:
    if loss is None or dense is None:
        return "-" if loss is None else f"{loss:.4f}"
    return f"{loss:.4f}" if loss == dense else f"{loss:.4f} ({loss / dense - 1:+.2%})"


# Student's t, two-sided 95%, by degrees of freedom; 1.96 at last.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
      2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval (infinite for one pair), of ``pairs``."""

    mean: float
    half: float
    pairs: int

    def marked(self, text: str) -> str:
        """``text``, behind ``=`` if zero lies in the interval."""
        zero = self.pairs > 1 and math.isfinite(self.mean) and abs(self.mean) <= self.half
        return f"= {text}" if zero else text

    def __str__(self) -> str:
        if self.pairs == 1:
            return f"{self.mean:+.2%} (1)"
        return f"{self.mean:+.2%} ± {self.half * 100:.2f} ({self.pairs})"


def difference(losses: Mapping[int, float], dense: Mapping[int, float]) -> Interval | None:
    """Of losses by seed, relative to dense's of the same seed; None without a pair. A run that
    diverged, whose loss is infinite, makes the mean infinite."""
    found = [losses[seed] / dense[seed] - 1 for seed in sorted(losses.keys() & dense.keys())]
    return _interval(found) if found else None


def _interval(found: Sequence[float]) -> Interval:
    mean = statistics.fmean(found)
    if len(found) == 1 or not math.isfinite(mean):
        return Interval(mean, math.inf, len(found))
    t = _T[min(len(found) - 2, len(_T) - 1)]
    return Interval(mean, t * statistics.stdev(found) / math.sqrt(len(found)), len(found))
