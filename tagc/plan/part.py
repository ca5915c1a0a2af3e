"""A backward that reaches only part of a unit, in the columns of the plan.

FSDP reduces only the gradients that the backward produced, and leaves ``.grad`` of the other
parameters alone. This happens with a loss computed in chunks over the head, and with experts that
get no token. The plan's messages have room for all parameters, so missing columns are sent as
zeros. FSDP has no buffer for the results of missing columns, so their residuals and other feedback
state are preserved, and wait for the next backward that reaches them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tagc.codecs.feedback import OWNER_RESIDUAL
from tagc.ops.program import OWN, Launch, Place, Step
from tagc.ops.torch_operators import Copy, Mark, PutBack, Runs
from tagc.plan.two_shots import slicing_of
from tagc.plan.unit_plan import Segment, UnitPlan


@dataclass(frozen=True)
class Part:
    """The parameters of a unit that a backward reached.

    Attributes:
        names: the names of these parameters.
    """

    plan: UnitPlan
    names: frozenset[str]

    @cached_property
    def runs(self) -> Runs:
        """The columns of every parameter in the plan."""
        return tuple(self._runs(self.plan.segments, present=True))

    @cached_property
    def missing_runs(self) -> Runs:
        """The columns of the unit's other parameters."""
        return tuple(self._runs(self.plan.segments, present=False))

    @cached_property
    def columns(self) -> int:
        """Elements per shard in FSDP's buffer, which holds these parameters only."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def compressed(self) -> bool:
        return any(map(self.reaches, self.plan.compressed))

    @property
    def mark(self) -> int:
        """A hash of the names, never 0. Ranks that reached the same parameters have the same."""
        return zlib.crc32("\n".join(sorted(self.names)).encode()) % (2**31 - 1) + 1

    def reaches(self, segment: Segment) -> bool:
        return any(param.name in self.names for param in segment.params)

    def _runs(self, segments: Sequence[Segment], *, present: bool) -> Iterator[slice]:
        for segment in segments:
            at = segment.start
            for param in segment.params:
                if (param.name in self.names) is present and param.columns:
                    yield slice(at, at + param.columns)
                at += param.columns


def preserving(
    part: Part, state: Mapping[str, Place], *, sketches: bool
) -> tuple[list[Step], list[Step]]:
    """Launches before and after a reduction that leave ``state``, the state that it changes by
    name, as it is for missing parameters. ``sketches``: the state of sketches is missing as a
    whole."""
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
                for run in part._runs([segment], present=False):
                    yield state[name][run.start - segment.start : run.stop - segment.start]


def _in_slices(
    part: Part, state: Mapping[str, Place], mask: Place
) -> Iterator[tuple[Place, Place]]:
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
