"""The accounts of one unit: what was handed out plus what is owed is what came in, on any route.

They read a reducer's state alone. How its columns lie among hosts, in slices of two shots and in
FSDP1's buffer is what the plan says; who sums what, and when, does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from support.units import gathered
from tagc.codecs.feedback import FeedbackRule
from tagc.collect.reducer_state import ReducerState
from tagc.plan import Segment, UnitPlan, slices_of
from tagc.plan.param_slices import ParamSlice, param_slices

HALF_ULP = 2.0**-24
"""Half a unit in the last place of float32, relative to the number."""


@dataclass
class Accounts:
    """The accounts of this rank's shard ``[S]``, float64, in the columns of FSDP's buffer.

    Attributes:
        exact: whether nothing may round.
        overshoot: how many times its element a code may stand for.
        owner_unit: the worth of an owner's residual or state in the sum over ranks: the number of
            replicas if owners keep averages.
    """

    reducer: ReducerState
    exact: bool = False
    overshoot: int = 1
    owner_unit: int = 1
    came_in: Tensor = field(init=False)
    handed_out: Tensor = field(init=False)
    allowed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        columns = self.reducer.plan.buffer_columns
        self.came_in, self.handed_out, self.allowed = torch.zeros(3, columns, dtype=torch.float64)

    def enter(self, buffers: Tensor, out: Tensor) -> None:
        """Enter a reduction, and check that nothing is lost or made up.

        Args:
            buffers: of all ranks, ``[R, W, S]``; across replicas ``[R, 1, S]``.
            out: the sum that this rank got, ``[S]``.
        """
        mine = buffers[:, 0 if self.reducer.plan.for_all else dist.get_rank()].double()
        self.came_in += mine.sum(0)
        self.handed_out += out.double()
        lost = (self.handed_out + self.owed() - self.came_in).abs()
        # A rank rounds its gradient plus its residual, and what is left of that; an owner every
        # addition; hosts, leads and waiting sums a few more. No number is larger than all of these.
        there = mine.abs().sum(0) + self._held(_size) + self._ahead(_size) + out.double().abs()
        self.allowed += (2 * len(buffers) + 8) * HALF_ULP * self.overshoot * there
        self.allowed += self._held(_stored_within)
        allowed = torch.zeros_like(lost) if self.exact else self.allowed
        assert bool((lost <= allowed).all()), f"{(lost - allowed).max():.3g} too much is lost"

    def owed(self) -> Tensor:
        """What all ranks owe this rank's shard, less what its owner is ahead by."""
        return self._held(_value) - self._ahead(_value)

    def _held(self, of: Of) -> Tensor:
        """What all ranks keep for this rank's shard: residuals, and gradients that wait."""
        reducer, plan = self.reducer, self.reducer.plan
        rows = laid_out(plan, _each(of, reducer.rules, reducer.residuals))
        if of is _value:
            stored = sum(int(r.count_nonzero()) for r in reducer.residuals.values())
            assert int(rows.count_nonzero()) == stored, "something is owed to padding"
        if reducer.waiting:
            assert reducer.waiting._sum is not None
            rows = rows + of(None, reducer.waiting._sum.view_as(rows))
        everyones = gathered(for_shards(plan, rows)).sum(0)
        total = everyones[0 if plan.for_all else dist.get_rank()]
        if plan.shots is None:
            return total
        debts = _each(of, reducer.rules, reducer.owner_residuals)
        sums = laid_out(plan, debts, row=dist.get_rank())
        return total + self.owner_unit * gathered(sums[0]).sum(0)

    def _ahead(self, of: Of) -> Tensor:
        """What owners are ahead by: ``(1 - K) / K`` of the last sums."""
        reducer, plan = self.reducer, self.reducer.plan
        states = _each(of, reducer.rules, reducer.owner_states)
        for i, last in states.items():
            lead = reducer.rules[i].lead
            states[i] = (1 - lead) / lead * last
        ahead = laid_out(plan, states, row=dist.get_rank())[0]
        if plan.shots is not None:
            ahead = gathered(ahead).sum(0)
        return self.owner_unit * ahead


# What is taken of a stored tensor [rows, columns]; no feedback keeps gradients that wait.
Of = Callable[[FeedbackRule | None, Tensor], Tensor]


def _value(rule: FeedbackRule | None, stored: Tensor) -> Tensor:
    return stored.double()


def _size(rule: FeedbackRule | None, stored: Tensor) -> Tensor:
    return stored.double().abs()


def _stored_within(rule: FeedbackRule | None, stored: Tensor) -> Tensor:
    """How far it may be from what was to be stored."""
    size = stored.double().abs()
    return 0 * size if rule is None or rule.dtype == torch.float32 else 2.0**-8 * size


def _each(
    of: Of, rules: Mapping[int, FeedbackRule], stored: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    return {start: of(rules[start], tensor) for start, tensor in stored.items()}


def laid_out(plan: UnitPlan, stored: Mapping[int, Tensor], row: int | None = None) -> Tensor:
    """Segments' ``[rows, columns]`` in FSDP's columns, ``[rows, S]`` float64, zero elsewhere.

    Args:
        stored: by the segment's first column in the unit.
        row: the only row that is there, of this rank's shard or slice; by default there are all.
    """
    rows = 1 if plan.for_all or row is not None else plan.peers
    out = torch.zeros(rows, plan.buffer_columns, dtype=torch.float64)
    for segment in plan.compressed:
        if segment.start not in stored:
            continue
        tensor = stored[segment.start]
        pieces = list(pieces_of(plan, segment))
        if not pieces:
            out[:, segment.start : segment.stop] = tensor
            continue
        for piece in pieces:
            if row is None or piece.row == row:
                found = tensor[0 if row is not None else piece.row, columns(piece.column, piece)]
                out[0 if rows == 1 else piece.row, columns(piece.start, piece)] = found
    return out


def pieces_of(plan: UnitPlan, segment: Segment) -> Iterator[ParamSlice]:
    """Where a segment's elements lie in FSDP's buffer, if not in the segment's own columns."""
    if plan.shots is not None:
        yield from slices_of(plan, segment)
    elif plan.info.flat is not None:
        yield from param_slices(plan.info, segment.params)


def columns(start: int, piece: ParamSlice) -> slice:
    """As many columns as the piece has."""
    return slice(start, start + piece.length)


def for_shards(plan: UnitPlan, rows: Tensor) -> Tensor:
    """A rank's rows, one for each host, as rows for all shards; as they are without hosts."""
    R = plan.info.ranks_per_host
    if R == 1:
        return rows
    every = rows.new_zeros(plan.rows, rows.shape[1])
    every[dist.get_rank() % R :: R] = rows
    return every


def planned(plan: UnitPlan) -> Tensor:
    """Which elements of FSDP1's buffer ``[W, S]`` belong to the plan's parameters."""
    mask = torch.zeros(plan.info.world_size, plan.buffer_columns, dtype=torch.bool)
    params = [param for segment in plan.segments for param in segment.params]
    for piece in param_slices(plan.info, params):
        mask[piece.row, piece.start : piece.start + piece.length] = True
    return mask
