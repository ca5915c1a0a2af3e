"""What sites cost: bytes of an exchange and of an optimizer step, and memory for the anchors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tagc.basics.quantities import format_bandwidth
from tagc.plan.programs import buffer_bytes, bytes_in_step
from tagc.plan.table import format_bytes
from tagc.plan.unit_plan import UnitPlan
from tagc.plan.units import UnitInfo
from tagc.policy.rules import SitesConfig

AT_ONCE = 2**24
"""Elements of the units that are exchanged at once at most; a larger unit is exchanged alone."""


def exchange_bytes(units: Sequence[UnitPlan]) -> float:
    """Bytes that a rank sends to other sites when every unit is exchanged once."""
    return sum(sum(bytes_in_step(unit)) for unit in units)


def anchor_bytes(units: Sequence[UnitPlan], config: SitesConfig) -> int:
    """Bytes that a rank stores besides residuals: anchors, outer momentum, changes in flight;
    without delay the changes of units that are exchanged at once, for a moment."""
    kept = 1 + bool(config.outer.momentum) + bool(config.delay)
    changes = 0 if config.delay else _most_at_once(units, config, lambda u: u.buffer_columns)
    return 4 * (kept * sum(unit.buffer_columns for unit in units) + changes)


def exchange_buffers(units: Sequence[UnitPlan], config: SitesConfig, *, gloo: bool) -> int:
    """Bytes of the scratch buffers of units that are exchanged at once."""
    return _most_at_once(units, config, lambda unit: buffer_bytes([unit], gloo=gloo))


def fragments_of(units: Sequence[UnitInfo], fragments: int) -> list[list[int]]:
    """Divide units into fragments of about equal size, by sizes that do not depend on the number of
    shards: the indexes of each fragment's units."""
    found: list[list[int]] = [[] for _ in range(fragments)]
    sizes = [0] * fragments
    for i, unit in enumerate(units):
        smallest = sizes.index(min(sizes))
        found[smallest].append(i)
        sizes[smallest] += unit.numel
    return found


def _most_at_once(
    units: Sequence[UnitPlan], config: SitesConfig, value: Callable[[UnitPlan], int]
) -> int:
    """The largest sum of the values of units that are exchanged at once."""
    most = 0
    for fragment in fragments_of([unit.info for unit in units], config.fragments):
        begun: list[UnitPlan] = []
        for unit in (units[i] for i in fragment):
            while begun and sum(u.buffer_columns for u in (*begun, unit)) > AT_ONCE:
                begun.pop(0)
            most = max(most, sum(map(value, (*begun, unit))))
            if unit.compressed:  # others are done at once
                begun.append(unit)
    return most


def about_sites(units: Sequence[UnitPlan], config: SitesConfig) -> Iterator[str]:
    """Notes for users."""
    sent = exchange_bytes(units)
    dense = sum(unit.dense_bytes(unit.buffer_columns) for unit in units)
    per_step = sent / config.every
    peers = units[0].peers
    yield (
        f"{peers} sites exchange changes of parameters once in {config.every} optimizer steps: "
        f"a rank sends {format_bytes(per_step)} per step, {dense / per_step:.0f} times less than "
        f"gradients in float32 in every step"
    )
    yield (
        f"anchors of sites: {format_bytes(anchor_bytes(units, config))}, included in the memory of "
        "a rank"
    )
    if config.together:
        yield (
            f"each of the first {config.together} optimizer steps exchanges all parameters: a rank "
            f"sends {format_bytes(sent)}, and training waits for it"
        )
    if config.delay:
        # All fragments are about equal.
        rate = sent / config.fragments / config.delay
        yield (
            f"an exchange hides behind {config.delay} steps if a rank sends "
            f"{format_bytes(rate)} to other sites in the time of a step: "
            f"{format_bandwidth(rate)} if that is 1 s"
        )
    else:
        yield "training waits for every exchange, as sites.delay is 0"
