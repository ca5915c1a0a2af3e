"""The table of paired differences, from records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..convergence.sweep import losses_of
from ..records import Record, markdown
from .intervals import difference
from .pairs import LINES, Losses, dense_rate, dense_run, line_run
from .settings import SETTINGS, Setting

_MOST_SEEDS = 64


def table(records: Sequence[Record]) -> str:
    """A row for each line in a setting: the difference from dense in percent of its loss, ± half of
    the 95% interval, and the number of pairs; ``=`` where dense lies in the interval."""
    losses = losses_of(records)
    rows: list[list[object]] = []
    for setting in SETTINGS.values():
        missing, rate = dense_rate(setting, losses)
        if missing or rate is None:
            continue
        dense = _by_seed(lambda seed, s=setting, r=rate: losses(dense_run(s, r, seed)))
        mean = sum(dense.values()) / len(dense)
        tokens = setting.shape.ranks * setting.shape.batch * setting.shape.context
        about = [setting.name, f"{tokens:,}", setting.steps, f"{rate:g}"]
        rows.append([*about, "dense", f"{mean:.4f} ({len(dense)})"])
        for name in LINES:
            cell = _cell(setting, name, rate, dense, losses)
            if cell:
                rows.append(["", "", "", "", name, cell])
    return markdown(["setting", "tokens a step", "steps", "rate", "line", "to dense"], rows)


def _cell(setting: Setting, name: str, rate: float, dense: dict[int, float], losses: Losses) -> str:
    line = LINES[name]
    mine = _by_seed(lambda seed: losses(line_run(setting, line, rate, seed)))
    found = difference(mine, dense)
    if found is None:
        return ""
    return f"{'= ' if found.is_zero and found.pairs > 1 else ''}{found}"


def _by_seed(loss: Callable[[int], float | None]) -> dict[int, float]:
    found = {seed: loss(seed) for seed in range(_MOST_SEEDS)}
    return {seed: value for seed, value in found.items() if value is not None}
