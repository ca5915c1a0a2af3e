"""The programs of a unit."""

from __future__ import annotations

from collections.abc import Iterator

from tagc.ops.program import Program
from tagc.plan.gathers import Gathers
from tagc.plan.reductions import Reductions
from tagc.plan.unit_plan import UnitPlan


def programs_of(unit: UnitPlan) -> Iterator[Program]:
    """The programs that a unit runs in training, but those for parts of it, in the order of first
    use."""
    if unit.direction != "parameters":
        yield from Reductions(unit).programs
        return
    gathers = Gathers(unit)
    if unit.keeps_copy:
        yield from (gathers.whole, gathers.changes, gathers.read)
        return
    if not unit.reuses_forward_message:
        yield gathers.message
        return
    yield from (gathers.message, gathers.kept_message, gathers.again)
