"""The plan and the reducers between sites, made anew if their number changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from tagc.attach import Levels
from tagc.checkpoint import UnitState
from tagc.collect import BareTransport, SilentGroup, Transport, UnitReducer
from tagc.handle.collectives import Collectives, make_collectives, on_gloo
from tagc.handle.readiness import with_kernels
from tagc.plan import Plan, between_sites, build_plan
from tagc.policy import Policy
from tagc.site.units import SiteUnit

_SENT = ("native_bytes", "message_bytes", "other_bytes")


@dataclass
class Owed:
    """What a site owes the others.

    Attributes:
        residuals: copies of the residuals, by unit and name.
        exchanges: exchanges of every unit so far.
    """

    residuals: Sequence[dict[str, Tensor]]
    exchanges: list[int]


class SiteReducers:
    """Makes the plan and the reducers of a site's units.

    Where sites come and go it makes them anew for each set of sites. A site keeps what it owes by
    parameter, so it does not depend on the number of sites. With two shots the owner of a slice,
    too, owes something; :meth:`fold` adds it to the site's own residual.

    Attributes:
        plan: the plan for the sites of the last exchange; at first for two, if they come and go.
        collectives: the reducers for these sites.
        nobody: stands for two sites, and sends nothing, if sites come and go.
    """

    def __init__(
        self, units: Sequence[SiteUnit], policy: Policy, ops: str | None, *, elastic: bool
    ) -> None:
        """Make reducers for the group of the units.

        Args:
            elastic: whether sites come and go.

        Raises:
            ValueError: if feedback has state that depends on who the sites are, and they come and
                go.
        """
        self._units, self._policy, self._ops = units, policy, ops
        self._connect = BareTransport if elastic else Transport
        self.nobody = units[0].group
        self._make(self.nobody)
        for reducer in self.collectives.reducers if elastic else ():
            if reducer.owner_states:
                raise ValueError(
                    f"unit {reducer.plan.info.label!r} has feedback with a lead, whose owners "
                    "keep what was sent last, and an owner may die: leave lead out for sites that "
                    "come and go"
                )

    def connect(self, group: dist.ProcessGroup, owed: Owed) -> Sequence[UnitReducer]:
        """Make the reducers for this group. What this site owes stays the same."""
        sent = [[getattr(r.counters, name) for name in _SENT] for r in self.collectives.reducers]
        self.collectives.clear()
        # A single site sends nothing, and keeps what it owes as between two.
        self._make(group if group.size() > 1 else self.nobody)
        reducers = self.collectives.reducers
        for reducer, bytes_sent, exchanges in zip(reducers, sent, owed.exchanges, strict=True):
            reducer.reset(exchanges)
            for name, count in zip(_SENT, bytes_sent, strict=True):
                setattr(reducer.counters, name, count)
        for state, residuals in zip(self._states(), owed.residuals, strict=True):
            for name, place, residual in state.residuals():
                place.put(residual, residuals[name])
        return reducers

    def owed(self) -> Owed:
        """A copy of what this site owes."""
        return Owed(
            residuals=[
                {name: place.take(residual) for name, place, residual in state.residuals()}
                for state in self._states()
            ],
            exchanges=[reducer.counters.all_steps for reducer in self.collectives.reducers],
        )

    def fold(self, group: dist.ProcessGroup) -> None:
        """Add what this site owes as the owner of slices to its own residuals. An owner owes parts
        of averages, so they count once for every site."""
        site, sites = group.rank(), group.size()
        for reducer in self.collectives.reducers:
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
        for reducer in self.collectives.reducers:
            # Sites compare marks before an exchange; headers would cost a round trip a unit.
            reducer.announces = False

    def _states(self) -> list[UnitState]:
        return [
            UnitState(
                direction=reducer.plan.direction,
                reducer=reducer,
                shard=unit.shard,
                shards=unit.shards,
                owners=False,
            )
            for unit, reducer in zip(self._units, self.collectives.reducers, strict=True)
        ]
