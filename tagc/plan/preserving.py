"""Preserves the feedback state of parameters that a backward did not reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tagc.codecs.feedback import OWNER_RESIDUAL
from tagc.ops.launches import Copy, Mark, PutBack
from tagc.ops.program import OWN, Launch, Place, Step
from tagc.plan.messages import Segment
from tagc.plan.part import Part
from tagc.plan.two_shots import slicing_of


def preserving(
    part: Part, state: Mapping[str, Place], *, sketches: bool
) -> tuple[list[Step], list[Step]]:
    """Launches before and after a reduction that leave the state of missing parameters as it is.

    Args:
        part: the parameters that the backward reached.
        state: the state that the reduction changes, by name.
        sketches: whether the state of sketches is missing as a whole.
    """
    before: list[Step] = []
    missing: list[tuple[Place, Place | None]]
    if part.plan.shots is None:
        missing = [(place, None) for place in _in_columns(part, state)]
    else:
        # A parameter is scattered over the slices, so a mask says where it is.
        unit, shots = part.plan, part.plan.shots
        columns = Place("missing", (1, unit.columns), unit.info.dtype)
        mask = Place("missing_slices", (unit.peers, shots.gather.columns), unit.info.dtype)
        before += [
            Launch(Mark(part.missing_runs), (columns,)),
            Launch(slicing_of(unit), (columns, mask)),
        ]
        missing = [*_in_slices(part, state, mask)]
    if sketches:
        missing += [(p, None) for name, p in state.items() if name.startswith("sketch.")]
    after: list[Step] = []
    for n, (place, where) in enumerate(missing):
        kept = Place(f"aside.{n}", place.view_shape, place.dtype)
        before.append(Launch(Copy(), (place, kept)))
        back = (Copy(), (kept, place)) if where is None else (PutBack(), (where, kept, place))
        after.append(Launch(*back))
    return before, after


def _in_columns(part: Part, state: Mapping[str, Place]) -> Iterator[Place]:
    for segment in part.plan.segments:
        for name in (f"residual.{segment.start}", *_owner_state(segment)):
            if name in state:
                yield from (state[name][columns] for columns in part.missing_columns(segment))


def _in_slices(
    part: Part, state: Mapping[str, Place], mask: Place
) -> Iterator[tuple[Place, Place]]:
    """The state of slices, each with a mask."""
    assert part.plan.shots is not None
    pairs = zip(part.plan.shots.reduce.segments, part.plan.segments, strict=True)
    for slices, segment in pairs:
        rows = mask[slices.start : slices.stop]
        own = mask.row(OWN)[slices.start : slices.stop]
        masks = {f"residual.{segment.start}": rows, f"{OWNER_RESIDUAL}.{segment.start}": own}
        masks |= dict.fromkeys(_owner_state(segment), own)
        yield from ((state[name], where) for name, where in masks.items() if name in state)


def _owner_state(segment: Segment) -> Iterator[str]:
    rule = segment.codec.feedback
    if rule is not None and rule.owner_state is not None:
        yield f"{rule.owner_state}.{segment.start}"
