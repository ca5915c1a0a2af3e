"""What sites cost: bytes of an exchange and of an optimizer step, and memory for the anchors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tagc.basics.quantities import format_bandwidth
from tagc.plan.memory import buffer_bytes
from tagc.plan.table import format_bytes
from tagc.plan.unit_plan import UnitPlan
from tagc.policy.sites import SitesConfig

AT_ONCE = 2**24
"""Elements of the units that are exchanged at once at most; a larger unit is exchanged alone."""


def exchange_bytes(units: Sequence[UnitPlan]) -> float:
    """Bytes that a rank sends to other sites when every unit is exchanged once."""
    return sum(unit.wire_bytes(segment) for unit in units for segment in unit.segments)


def anchor_bytes(units: Sequence[UnitPlan], config: SitesConfig) -> int:
    """Bytes that a rank stores besides residuals: anchors, outer momentum, changes in flight;
    without delay the changes of units that are exchanged at once, for a moment."""
    columns = [unit.buffer_columns for unit in units]
    kept = 1 + bool(config.outer.momentum) + bool(config.delay)
    return 4 * (kept * sum(columns) + (0 if config.delay else _most_at_once(columns, columns)))


def exchange_buffers(units: Sequence[UnitPlan], *, gloo: bool) -> int:
    """Bytes of the scratch buffers of units that are exchanged at once."""
    sizes = [buffer_bytes([unit], gloo=gloo) for unit in units]
    return _most_at_once([unit.buffer_columns for unit in units], sizes)


def _most_at_once(elements: Sequence[int], values: Sequence[int]) -> int:
    """The largest sum of the values of neighbouring units that are exchanged at once."""
    most = first = 0
    for stop in range(1, len(elements) + 1):
        while first < stop - 1 and sum(elements[first:stop]) > AT_ONCE:
            first += 1
        most = max(most, sum(values[first:stop]))
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
