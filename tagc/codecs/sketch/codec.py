"""The ``sketch`` codec: the unit's message carries the index; the cells are summed on the way.

With a shared support (:mod:`tagc.codecs.selection.support`) every rank sketches the same groups, so
the sum has no more keys than one rank's sketch, and every key a cell of its own. The owner already
knows these groups. So messages carry the sender's choice for the next step in place of the index,
before the poison word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tagc.codecs.codec import Codec, CodecSegment, CodecSetup, Part, SelectionCount
from tagc.codecs.exchange import Exchange, Work
from tagc.codecs.feedback.residual import opened
from tagc.codecs.selection.quantization_step import step_scale
from tagc.codecs.selection.support import Support
from tagc.codecs.selection.threshold import (
    ThresholdController,
    check_counts,
    mean_threshold,
    sampled_threshold,
)
from tagc.codecs.sketch.plan import SketchPlan
from tagc.codecs.state import nested, part_of
from tagc.ops import COUNTS, KEPT

# If there is room for every group, all are kept, and the threshold only sets the step. The median
# is a scale that neither outliers nor zeros move.
_SCALE_DENSITY = 0.5


@dataclass
class _Shared:
    """A segment's shared support.

    Attributes:
        place: the segment's position among those with a shared support.
        support: the groups that all ranks send.
        union: ``[1, index_words]``, the index for decoding this rank's shard.
        places: from encoding to decoding, the places of this rank's shard among the cells.
    """

    place: int
    support: Support
    union: Tensor
    places: Tensor | None = None


class SketchCodec(Codec[SketchPlan]):
    """The sketched segments of a unit, and their thresholds. Every rank has the same thresholds.

    Attributes:
        seed: ``[1]`` int32, the seed of this step's hashes.
    """

    def __init__(self, segments: Sequence[CodecSegment[SketchPlan]], setup: CodecSetup) -> None:
        super().__init__(segments, setup)
        W, D, device = setup.world_size, setup.destinations, setup.device
        self._shared: dict[int, _Shared] = {}
        self._cell_columns: list[slice] = []
        self._cells = 0
        for i, part in enumerate(self.parts):
            plan, stored = part.plan, part.feedback.residual_dtype
            self._ops.prepare(plan.layout, setup.dtype, stored)
            self._cell_columns.append(slice(self._cells, self._cells + plan.sent_cells))
            self._cells += plan.cells
            if plan.shared:
                support = Support(plan.layout, plan.capacity, plan.target, D, device)
                union = torch.zeros(1, plan.layout.index_words, dtype=torch.int32, device=device)
                self._shared[i] = _Shared(len(self._shared), support, union)
        n = len(self.parts)
        self.seed = torch.tensor([setup.seed], dtype=torch.int32, device=device)
        plans = [part.plan for part in self.parts]
        self._controller = ThresholdController(
            [W * _scale_density(part) * part.plan.layout.groups for part in self.parts],
            D,
            self._ops,
            device,
            max_boost=[plan.max_boost for plan in plans],
            scale=[step_scale(plan.symbol, plan.levels) for plan in plans],
            learns=[not plan.shared for plan in plans],
        )
        self._counts = torch.zeros(n, D, COUNTS, dtype=torch.int32, device=device)
        self._summed = torch.zeros_like(self._counts)
        self._stats = torch.zeros(n, 2, dtype=torch.int32, device=device)
        self._chosen = self._counts.new_zeros(len(self._shared), D, COUNTS)
        # A choice needs its own threshold: the agreed one controls what all ranks send together.
        self._choice_controller: ThresholdController | None = None
        if self._shared:
            wanted = [shared.support.wanted for shared in self._shared.values()]
            self._choice_controller = ThresholdController(wanted, D, self._ops, device)
        self._started = False
        self._counting: Work | None = None
        self._sum: tuple[Work, Tensor] | None = None
        # [segments, 3] int64 sums over steps: groups selected for all destinations, then the two
        # entries of `stats`: groups in the union of this rank's shard, and unresolved ones.
        self._totals = torch.zeros(n, 3, dtype=torch.int64, device=device)

    @property
    def quantization_steps(self) -> Tensor:
        """This step's quantization steps, ``[segments, D]`` float32."""
        return self._controller.quantization_step

    @property
    def controllers(self) -> tuple[ThresholdController, ...]:
        choice = self._choice_controller
        return (self._controller,) if choice is None else (self._controller, choice)

    @property
    def supports(self) -> dict[int, Support]:
        """The shared supports, by number of the part."""
        return {i: shared.support for i, shared in self._shared.items()}

    def encode(self, grad: Tensor, message: Tensor, exchange: Exchange) -> None:
        self._update_thresholds(grad, exchange)
        self.seed.add_(1)
        for i, part in enumerate(self.parts):
            plan, index, shared = part.plan, message[:, part.words], self._shared.get(i)
            gradient, cells = grad[:, part.columns], self._cells_to_send()[:, self._cell_columns[i]]
            table = cells if shared is None else self._table_of(plan)
            with part.feedback.opened(gradient) as residual:
                self._ops.encode(
                    gradient,
                    residual,
                    self._controller.threshold[i],
                    self._controller.quantization_step[i],
                    self.seed,
                    index,
                    table,
                    self._counts[i],
                    layout=plan.layout,
                    levels=plan.levels,
                    capacity=plan.capacity,
                    support=None if shared is None else shared.support.current,
                )
            if shared is not None:
                # All of them would keep much memory until they are decoded.
                shared.places = shared.support.collect(table, cells)[exchange.row].clone()
                self._choose(part, shared, index, exchange.row)

    def _choose(self, part: Part[SketchPlan], shared: _Shared, index: Tensor, own: int) -> None:
        """Overwrite the index, which the owner already knows, with this rank's choice."""
        assert part.feedback.residual is not None
        assert self._choice_controller is not None
        row = slice(own, own + 1)
        shared.support.choose(
            self._ops,
            part.feedback.residual.read(row),
            self._choice_controller.threshold[shared.place, row],
            index[:, : part.plan.layout.words],
            self._chosen[shared.place],
        )

    def start(self, exchange: Exchange) -> None:
        """Start summing the cells, and the counts for the next step."""
        self._sum = exchange.sum_cells(self._cells_to_send())
        self._summed.copy_(self._counts)
        self._counting = exchange.sum_counts(self._summed)
        self._started = True

    def wait(self) -> None:
        """Wait for the cells. The counts are not needed before the next step."""
        assert self._sum is not None
        self._sum[0].wait()

    def decode(self, received: Tensor, out: Tensor, exchange: Exchange, divisor: int) -> None:
        own = slice(exchange.row, exchange.row + 1)
        assert self._sum is not None
        summed, self._sum = self._sum[1], None
        for i, part in enumerate(self.parts):
            index, shared = received[:, part.words], self._shared.get(i)
            cells = summed[self._cell_columns[i]]
            if shared is not None:
                assert shared.places is not None
                cells, shared.places = shared.support.spread(cells, shared.places), None
                choices, poison = index[:, :-1], index[:, -1]
                shared.union[0, :-1] = shared.support.current[exchange.row]
                torch.amax(poison, 0, out=shared.union[0, -1])
                shared.support.receive(choices)
                index = shared.union
            columns = out[part.columns]
            decoded = part.feedback.decode_buffer(columns)
            residual = part.feedback.residual if exchange.takes_leftovers else None
            with opened(residual, own) as owed:
                self._ops.decode(
                    index,
                    cells,
                    self._controller.quantization_step[i, own],
                    self.seed,
                    decoded,
                    None if owed is None else owed[0],
                    self._stats[i],
                    layout=part.plan.layout,
                    divisor=divisor,
                )
            part.feedback.correct(decoded, columns)
        self._totals[:, 0].add_(self._counts[..., KEPT].sum(1))
        self._totals[:, 1:].add_(self._stats)

    def selection_counts(self) -> list[SelectionCount]:
        counts = []
        for part, totals in zip(self.parts, self._totals.tolist(), strict=True):
            lanes = part.plan.symbol.lanes
            selected, union, unresolved = totals
            counts.append(
                SelectionCount(
                    target=part.plan.target,
                    elements=part.plan.layout.groups * lanes,
                    selected=selected * lanes,
                    union=union * lanes,
                    unresolved=unresolved,
                )
            )
        return counts

    def state(self) -> dict[str, Tensor]:
        self._wait_for_counts()
        state = {
            "started": torch.tensor(self._started, dtype=torch.bool, device="cpu"),
            "seed": self.seed,
            "summed": self._summed,
            "totals": self._totals,
            **nested("controller", self._controller.state()),
        }
        if self._choice_controller is not None:
            state["chosen"] = self._chosen
            state |= nested("choice_controller", self._choice_controller.state())
        for shared in self._shared.values():
            state |= nested(f"support.{shared.place}", shared.support.state())
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        check_counts(state["summed"])
        self._controller.check_state(part_of("controller", state))
        if self._choice_controller is not None:
            check_counts(state["chosen"])
            self._choice_controller.check_state(part_of("choice_controller", state))
        for shared in self._shared.values():
            shared.support.check_state(part_of(f"support.{shared.place}", state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._wait_for_counts()
        self._started = bool(state["started"])
        self.seed.copy_(state["seed"])
        self._summed.copy_(state["summed"])
        self._totals.copy_(state["totals"])
        self._controller.load_state(part_of("controller", state))
        if self._choice_controller is not None:
            self._chosen.copy_(state["chosen"])
            self._choice_controller.load_state(part_of("choice_controller", state))
        for shared in self._shared.values():
            shared.support.load_state(part_of(f"support.{shared.place}", state))

    def _update_thresholds(self, grad: Tensor, exchange: Exchange) -> None:
        choice = self._choice_controller
        if self._started:
            self._wait_for_counts()
            self._controller.update(self._summed)
            if choice is not None:
                choice.update(self._chosen)
            return
        # This is the only exchange that a unit waits for before it sends.
        sampled = [
            sampled_threshold(grad[:, part.columns], part.plan.symbol.lanes, _scale_density(part))
            for part in self.parts
        ]
        self._controller.start(mean_threshold(exchange.gather(torch.stack(sampled))))
        if choice is not None:
            choice.start(self._controller.threshold[list(self._shared)])

    def _wait_for_counts(self) -> None:
        if self._counting is not None:
            self._counting.wait()
            self._counting = None

    def _table_of(self, plan: SketchPlan) -> Tensor:
        """A cell for every group, of which the support's are sent."""
        shape = (self._setup.destinations, plan.table_cells)
        return self._setup.workspace.take("cells_of_groups", shape, torch.int32)

    def _cells_to_send(self) -> Tensor:
        shape = (self._setup.destinations, self._cells)
        return self._setup.workspace.take("cells_send", shape, torch.int32)


def _scale_density(part: Part[SketchPlan]) -> float:
    """The density that the first threshold is sampled for, and that thresholds then keep."""
    everything = part.plan.capacity >= part.plan.layout.groups
    return min(part.plan.target, _SCALE_DENSITY) if everything else part.plan.target
