"""The plan and the reducers between sites, and what a site owes the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.attach import Levels
from tagc.collect import BareTransport, SilentGroup, Transport, UnitReducer
from tagc.handle.collectives import Collectives, make_collectives, on_gloo, with_kernels
from tagc.plan import Plan, UnitPlan, between_sites, build_plan
from tagc.plan.two_shots import slicing_of
from tagc.policy import Policy
from tagc.site.units import SiteUnit


@dataclass
class Owed:
    """What a site owes the others of one unit: copies of the residuals, as
    :attr:`UnitReducer.residuals` by the plan of that time, after so many exchanges."""

    plan: UnitPlan
    residuals: dict[int, Tensor]
    exchanges: int

    def put(self, reducer: UnitReducer) -> None:
        """Copy the residuals to those of a reducer. If it is for another number of sites, they are
        in other slices there."""
        residuals = self.residuals
        if reducer.plan.peers != self.plan.peers:
            residuals = _in_slices(reducer.plan, self.in_shard())
        for start, residual in reducer.residuals.items():
            residual.copy_(residuals[start])

    def in_shard(self) -> Tensor:
        """The residuals in the columns of the shard, ``[1, S]``; zeros where there are none."""
        plan, none = self.plan, torch.empty(0, dtype=torch.float32, device="cpu")
        some = next(iter(self.residuals.values()), none)
        shard = some.new_zeros(1, plan.buffer_columns, dtype=torch.float32)
        if plan.shots is None:
            for start, residual in self.residuals.items():
                shard[:, start : start + residual.shape[1]].copy_(residual)
            return shard
        slices = some.new_zeros(plan.peers, plan.shots.reduce.columns, dtype=torch.float32)
        for whole, part in zip(plan.segments, plan.shots.reduce.segments, strict=True):
            if whole.start in self.residuals:
                slices[:, part.start : part.stop].copy_(self.residuals[whole.start])
        replace(slicing_of(plan), back=True, empty=()).run(slices, shard)
        return shard


class SiteReducers:
    """The plan and the reducers of a site's units for the sites of the last exchange; at first for
    two, if they come and go."""

    def __init__(
        self, units: Sequence[SiteUnit], policy: Policy, ops: str | None, *, elastic: bool
    ) -> None:
        """Make reducers for the group of the units; raise ValueError if sites come and go, and
        feedback has state that depends on who they are."""
        self._units, self._policy, self._ops = units, policy, ops
        self._connect = BareTransport if elastic else Transport
        self._make(units[0].group)
        for reducer in self.reducers if elastic else ():
            if reducer.owner_states:
                raise ValueError(
                    f"unit {reducer.plan.info.label!r} has feedback with a lead, whose owners "
                    "keep what was sent last, and an owner may die: leave lead out for sites that "
                    "come and go"
                )

    @property
    def reducers(self) -> list[UnitReducer]:
        """The reducers, by unit."""
        return self.collectives.reducers

    def owed(self) -> list[Owed]:
        """What this site owes, by unit."""
        return [
            Owed(
                reducer.plan,
                {start: residual.clone() for start, residual in reducer.residuals.items()},
                reducer.counters.all_steps,
            )
            for reducer in self.reducers
        ]

    def restore(self, owed: Sequence[Owed], group: dist.ProcessGroup | None = None) -> None:
        """Owe this, and start over with all other state of the codecs, as all sites do then;
        ``group`` are the sites from now on, if they are others than before."""
        counters = [reducer.counters for reducer in self.reducers]
        # A single site sends nothing, and keeps what it owes as between two.
        if group is not None and max(2, group.size()) != self.plan.units[0].peers:
            self.collectives.clear()
            self._make(group if group.size() > 1 else self._units[0].group)
        for reducer, before, of_unit in zip(self.reducers, counters, owed, strict=True):
            reducer.store.drop()
            reducer.reset(of_unit.exchanges)
            reducer.counters = replace(
                before, steps=0, compressed_steps=0, earlier_steps=of_unit.exchanges
            )
            of_unit.put(reducer)

    def fold(self, group: dist.ProcessGroup) -> None:
        """Add what this site owes as the owner of slices to its own residuals. An owner owes parts
        of averages, so they count once for every site."""
        site, sites = group.rank(), group.size()
        for reducer in (r for r in self.reducers if r.plan.shots is not None):
            own = reducer.residuals
            for i, residual in reducer.owner_residuals.items():
                own[i][site].add_(residual[0], alpha=sites)
                residual.zero_()

    def _make(self, group: dist.ProcessGroup) -> None:
        units = [
            replace(unit, info=between_sites(unit.info, group.size()), group=group)
            for unit in self._units
        ]
        gloo = isinstance(group, SilentGroup) or on_gloo(units)
        plan = build_plan([unit.info for unit in units], self._policy, gloo=gloo)
        self.plan: Plan = with_kernels(units, plan, self._ops)
        self.collectives: Collectives = make_collectives(
            units, self.plan, Levels([], None, {}), self._ops, None, self._connect, in_turns=True
        )
        for reducer in self.reducers:
            # Sites compare marks before an exchange; headers would cost a round trip a unit.
            reducer.announces = False


def _in_slices(plan: UnitPlan, shard: Tensor) -> dict[int, Tensor]:
    """Residuals as a plan has them, from those in the columns of the shard."""
    if plan.shots is None:
        return {s.start: shard[:, s.start : s.stop] for s in plan.segments}
    slices = shard.new_zeros(plan.peers, plan.shots.reduce.columns)
    slicing_of(plan).run(shard, slices)
    pairs = zip(plan.segments, plan.shots.reduce.segments, strict=True)
    return {whole.start: slices[:, part.start : part.stop] for whole, part in pairs}
