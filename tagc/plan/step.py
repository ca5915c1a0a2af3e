"""What a rank sends in an optimizer step, with the parameters that FSDP gathers itself: the plan's
first line, and what a step means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tagc.codecs.dense import DensePlan
from tagc.plan.messages import Segment
from tagc.plan.programs import bytes_in_step
from tagc.plan.table import format_bytes
from tagc.plan.unit_plan import Direction, UnitPlan
from tagc.plan.units import UnitInfo

Sent = tuple[float, float]
"""Bytes that a rank sends, and that it would send uncompressed."""


def native_units(infos: Iterable[UnitInfo], direction: Direction) -> list[UnitPlan]:
    """Plans of units that FSDP sends uncompressed."""
    units = []
    for info in infos:
        columns = sum(p.columns for p in info.params)
        segment = Segment(
            start=0,
            stop=columns,
            params=info.params,
            rule=None,
            codec=DensePlan(numel=columns, wire=info.dtype),
        )
        units.append(UnitPlan(info=info, segments=(segment,), direction=direction))
    return units


def sent_in_step(units: Sequence[UnitPlan], micro_batches: int) -> Sent:
    """The bytes of these units in a step."""
    wire = dense = 0.0
    for unit in units:
        wire += sum(bytes_in_step(unit, micro_batches))
        columns = sum(unit.dense_columns(segment.params) for segment in unit.segments)
        dense += unit.dense_bytes(columns, micro_batches)
    return wire, dense


def total(sent: Mapping[str, Sent]) -> Sent:
    """The bytes of all directions together."""
    wires, denses = zip(*sent.values(), strict=True) if sent else ((), ())
    return sum(wires), sum(denses)


def times_less(sent: Sent) -> str:
    """The ratio as text: ``7.87×``."""
    wire, dense = sent
    ratio = dense / wire if wire else 1.0
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def headline(sent: Mapping[str, Sent], per: str, *, native: bool) -> str:
    """What a rank sends, and by how much less, by direction and together.

    Args:
        sent: by direction.
        per: the time in which it is sent.
        native: whether FSDP sends the parameters itself.
    """
    wire, dense = total(sent)
    parts = [f"{name} {times_less(one)}" for name, one in sent.items()]
    parts = [f"{p} (FSDP sends them)" if native and p.startswith("param") else p for p in parts]
    if len(parts) > 1:
        parts.append(f"together {times_less((wire, dense))}")
    return (
        f"a rank sends {format_bytes(wire)} per {per} instead of {format_bytes(dense)}: "
        f"{', '.join(parts)} less"
    )


def about_steps(units: Sequence[UnitPlan], micro_batches: int) -> Iterator[str]:
    """A note on what a step is, and what micro-batches send.

    Args:
        units: of all directions, those that FSDP sends itself included.
    """
    more = [b - a for a, b in zip(sent_in_step(units, 1), sent_in_step(units, 2), strict=True)]
    step = "one backward" if micro_batches == 1 else f"{micro_batches} backwards"
    if any(unit.info.replicated for unit in units):
        yield f"a step is {step}; with no_sync() only the last micro-batch sends"
    elif any(sent_in_step(units, 1)):
        once = any(unit.all_reduced or unit.info.ranks_per_host > 1 for unit in units)
        how = ", with set_requires_all_reduce(False)" if once else ""
        yield (
            f"a step is {step}; each micro-batch after the first sends {format_bytes(more[0])} "
            f"(uncompressed {format_bytes(more[1])}){how}"
        )
