"""The ``sketch`` codec: the unit's message carries the index; the cells are summed on the way.

With a shared support (:mod:`tagc.codecs.sketch.support`) every rank sketches the same groups, so
the sum has no more keys than one rank's sketch, and every key a cell of its own. The owner already
knows these groups. So messages carry the sender's choice for the next step in place of the index,
before the poison word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tagc.codecs.plan import Span
from tagc.codecs.sketch.plan import SketchPlan, step_scale
from tagc.codecs.sketch.support import Support
from tagc.codecs.sketch.threshold import (
    ChoiceStart,
    SampleThreshold,
    Thresholds,
    ThresholdStart,
    check_controller,
)
from tagc.codecs.state import check_counts, part_of
from tagc.ops import COUNTS, KEPT, Ops
from tagc.ops.launches import OfOps
from tagc.ops.program import (
    OWN,
    Collective,
    Index,
    Launch,
    Level,
    Operator,
    Place,
    Send,
    Step,
    Wait,
)
from tagc.ops.sketch import SketchLayout
from tagc.ops.thresholds import STEP, THRESHOLD
from tagc.ops.torch_operators import Advance, Copy, Set

# If there is room for every group, all are kept, and the threshold only sets the step. The median
# is a scale that neither outliers nor zeros move.
_SCALE_DENSITY = 0.5
COUNTING = "counts"
"""The flight of the counts, which the next step waits for."""


@dataclass(frozen=True)
class EncodeSketch(OfOps):
    """``(x, residual or None, threshold, step, seed, index, cells, counts, support or None)``."""

    name: ClassVar[str] = "encode"

    layout: SketchLayout
    levels: int
    capacity: int


@dataclass(frozen=True)
class DecodeSketch(OfOps):
    """``(index, cells [1, c], step, seed, out [1, n], residual [1, n] or None, stats)``.

    Attributes:
        for_all: whether all ranks decode the same. Then only the first adds what it could not
            decode to its residual.
    """

    name: ClassVar[str] = "decode"

    layout: SketchLayout
    divisor: int
    for_all: bool

    def bound(self, ops: Ops, own: int) -> Callable[..., object]:
        decode = partial(ops.decode, layout=self.layout, divisor=self.divisor)
        if not (self.for_all and own):
            return decode

        def keep_nothing(*tensors: Any) -> None:
            index, cells, step, seed, out, _, stats = tensors
            decode(index, cells, step, seed, out, None, stats)

        return keep_nothing

    def adapted(self, argument: int, tensor: Tensor) -> Tensor:
        return tensor[0] if argument in (1, 4, 5) else tensor


@dataclass(frozen=True)
class CountGroups(Operator):
    """``(counts [segments, D, 4], stats [segments, 2], totals [segments, 3] int64)``: adds to the
    groups selected for all destinations, the groups in the union of this rank's shard, and the
    unresolved ones."""

    def run(self, counts: Tensor, stats: Tensor, totals: Tensor) -> None:
        totals[:, 0].add_(counts[..., KEPT].sum(1))
        totals[:, 1:].add_(stats)


@dataclass(frozen=True, kw_only=True)
class SelectionCount:
    """Counts of a codec that selects, for one segment so far.

    Attributes:
        target: the density that the policy asks for.
        elements: elements for one destination, including padding.
        selected: elements sent to all destinations.
        union: elements of this rank's own shard that at least one rank sent.
        unresolved: groups of the own shard that could not be decoded.
    """

    target: float
    elements: int
    selected: int
    union: int
    unresolved: int


class Sketches:
    """The steps of the sketched segments of a unit, which share seed, thresholds, cells and counts.
    Every rank has the same thresholds.

    Attributes:
        spans: the segments.
        controller: the thresholds' state, see :func:`tagc.ops.reference.steer`.
        supports: the shared supports, by number of the segment.
    """

    def __init__(
        self, spans: Sequence[Span[Any]], *, rows: int, ranks: int, level: Level, for_all: bool
    ) -> None:
        """Name the tensors.

        Args:
            rows: rows ``D`` that a rank encodes.
            ranks: ranks ``W`` that encode.
            level: the level on which they send each other messages.
            for_all: whether all ranks decode the same row.
        """
        self.spans, self._rows, self._ranks = spans, rows, ranks
        self._level: Level = level
        self._for_all = for_all
        self._plans: list[SketchPlan] = [span.segment.codec for span in spans]
        n = len(spans)
        self.supports: dict[int, Support] = {}
        self._columns: list[slice] = []
        cells = 0
        for i, plan in enumerate(self._plans):
            self._columns.append(slice(cells, cells + plan.sent_cells))
            cells += plan.cells
            if plan.shared:
                self.supports[i] = Support(plan, len(self.supports), rows)
        self.seed = Place("sketch.seed", (1,), torch.int32, "state")
        self.totals = Place("sketch.totals", (n, 3), torch.int64, "state")
        self._counts = Place("sketch.counts", (n, rows, COUNTS), torch.int32)
        self._stats = Place("sketch.stats", (n, 2), torch.int32)
        self._cells = Place("cells_send", (rows, cells), torch.int32)
        self._sum = self._cells if for_all else Place("cells_sum", (1, cells), torch.int32)
        plans = self._plans
        self._thresholds = Thresholds(
            "controller",
            "summed",
            rows,
            [ranks * _scale_density(plan) * plan.layout.groups for plan in plans],
            max_boost=[plan.max_boost for plan in plans],
            scale=self._scales,
            learns=[not plan.shared for plan in plans],
        )
        # A choice needs its own threshold: the agreed one controls what all ranks send together.
        wanted = [support.wanted for support in self.supports.values()]
        self._choices = Thresholds("choice_controller", "chosen", rows, wanted)
        self.controller, self.choice = self._thresholds.state, self._choices.state

    def start(self, seed: int) -> Iterator[Launch]:
        """The first values of the state."""
        yield Launch(Set((seed,)), (self.seed,))
        yield from self._thresholds.start()
        if self.supports:
            yield from self._choices.start()
        for support in self.supports.values():
            yield from support.start()

    def encode(
        self, x: Place, message: Place, residuals: Sequence[Place | None], *, begun: bool
    ) -> Iterator[Step]:
        """Write the messages about ``x`` ``[D, S]``.

        Args:
            residuals: ``[D, columns]``, by segment.
            begun: whether there are thresholds.
        """
        yield from self._steer() if begun else self._begin(x)
        yield Launch(Advance(1), (self.seed,))
        controller = self.controller
        for i, (span, plan, residual) in enumerate(
            zip(self.spans, self._plans, residuals, strict=True)
        ):
            index, cells = message[span.words], self._cells[self._columns[i]]
            support = self.supports.get(i)
            places = (
                x[span.columns],
                residual,
                controller.row(THRESHOLD, i),
                controller.row(STEP, i),
                self.seed,
                index,
                cells if support is None else support.table,
                self._counts.row(i),
                None if support is None else support.current,
            )
            encode = EncodeSketch(plan.layout, plan.levels, plan.capacity)
            yield Launch(encode, places, plan.name)
            if support is not None:
                assert residual is not None
                threshold = self.choice.row(THRESHOLD, support.number, OWN)
                chosen = self._choices.counts.row(support.number)
                yield from support.collect(cells)
                # The owner already knows the index.
                yield from support.choose(
                    residual.row(OWN), threshold, index[: plan.layout.words], chosen
                )

    def beside(self) -> Iterator[Step]:
        """Start summing the cells, and the counts for the next step."""
        if self._for_all:
            yield self._send("all-reduce", self._cells, self._cells, "cells")
        else:
            yield self._send("reduce-scatter", self._sum, self._cells, "cells")
        summed = self._thresholds.counts
        yield Launch(Copy(), (self._counts, summed))
        # They are not needed before the next step.
        yield Send(
            "all-reduce", self._level, self._ranks, summed, summed, COUNTING,
            in_flight=True,
        )  # fmt: skip

    def decode(
        self, i: int, received: Place, out: Place, residual: Place | None, divisor: int
    ) -> Iterator[Launch]:
        """Write the sum of segment ``i`` over ranks, divided by ``divisor``, to ``out``."""
        span, plan = self.spans[i], self._plans[i]
        index, cells = received[span.words], self._sum[self._columns[i]]
        support = self.supports.get(i)
        if support is not None:
            yield from support.receive(index, cells)
            index, cells = support.union, support.spread
        own: tuple[Index, ...] = () if self._for_all else (OWN,)
        places = (
            index,
            cells,
            self.controller.row(STEP, i, *own),
            self.seed,
            out,
            residual and residual.row(*own),
            self._stats.row(i),
        )
        yield Launch(DecodeSketch(plan.layout, divisor, self._for_all), places, plan.name)

    def count(self) -> Iterator[Launch]:
        """Count what was sent, after all segments are decoded."""
        yield Launch(CountGroups(), (self._counts, self._stats, self.totals))

    def selection_counts(self, totals: Tensor) -> list[SelectionCount]:
        """Counts of selected elements so far, by segment. Waits for the device."""
        counts = []
        for plan, (selected, union, unresolved) in zip(self._plans, totals.tolist(), strict=True):
            lanes = plan.symbol.lanes
            counts.append(
                SelectionCount(
                    target=plan.density,
                    elements=plan.layout.groups * lanes,
                    selected=selected * lanes,
                    union=union * lanes,
                    unresolved=unresolved,
                )
            )
        return counts

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that the state never has."""
        check_counts("selected groups", state["summed"])
        most = max(plan.max_boost for plan in self._plans)
        check_controller(part_of("controller", state), max_boost=most)
        if self.supports:
            check_counts("chosen groups", state["chosen"])
            check_controller(part_of("choice_controller", state), max_boost=1.0)
        for support in self.supports.values():
            support.check_state(part_of(f"support.{support.number}", state))

    def _steer(self) -> Iterator[Step]:
        yield Wait(COUNTING)
        yield self._thresholds.steer()
        if self.supports:
            yield self._choices.steer()

    def _begin(self, x: Place) -> Iterator[Step]:
        """This is the only exchange that a unit waits for before it sends."""
        n = len(self.spans)
        own = Place("sampled", (1, n * self._rows), torch.float32)
        all_ = Place("sampled_by_all", (self._ranks, n * self._rows), torch.float32)
        for i, (span, plan) in enumerate(zip(self.spans, self._plans, strict=True)):
            sample = SampleThreshold(plan.symbol.lanes, _scale_density(plan))
            out = own[i * self._rows : (i + 1) * self._rows]
            yield Launch(sample, (x[span.columns], out), plan.name)
        yield self._send("all-gather", all_, own, "sampled")
        yield Wait("sampled")
        yield Launch(ThresholdStart(self._scales), (all_, self.controller))
        if self.supports:
            yield Launch(ChoiceStart(tuple(self.supports)), (self.controller, self.choice))

    @property
    def _scales(self) -> tuple[float, ...]:
        return tuple(step_scale(plan.symbol, plan.levels) for plan in self._plans)

    def _send(self, kind: Collective, out: Place, inp: Place, flight: str) -> Send:
        return Send(kind, self._level, self._ranks, out, inp, flight)


def _scale_density(plan: SketchPlan) -> float:
    """The density that the first threshold is sampled for, and that thresholds then keep."""
    everything = plan.capacity >= plan.layout.groups
    return min(plan.density, _SCALE_DENSITY) if everything else plan.density
