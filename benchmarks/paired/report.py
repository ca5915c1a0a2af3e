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
    """A row for each setting, the difference from dense in percent of its loss, ± half of the 95%
    interval, and the number of pairs; ``=`` where dense lies in the interval."""
    losses = losses_of(records)
    rows = []
    used: set[str] = set()
    for setting in SETTINGS.values():
        missing, rate = dense_rate(setting, losses)
        if missing or rate is None:
            continue
        dense = _by_seed(lambda seed, s=setting, r=rate: losses(dense_run(s, r, seed)))
        cells = {name: _cell(setting, name, rate, dense, losses) for name in LINES}
        used |= {name for name, cell in cells.items() if cell}
        tokens = setting.shape.ranks * setting.shape.batch * setting.shape.context
        about = [setting.name, f"{tokens:,}", setting.steps, f"{rate:g}"]
        mean = sum(dense.values()) / len(dense)
        rows.append(([*about, f"{mean:.4f}"], cells))
    names = [name for name in LINES if name in used]
    head = ["setting", "tokens a step", "steps", "rate", "dense", *names]
    return markdown(head, [[*about, *(cells[n] for n in names)] for about, cells in rows])


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
