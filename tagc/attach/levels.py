"""Decides which units add up gradients inside a host first, and makes their process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from tagc.attach.unit import Unit, ranks_of
from tagc.attach.whole import whole_on_hosts
from tagc.collect.hosts import HostGroups, HostLayout, Hosts, RankOnHost, host_groups, layout_of
from tagc.plan import UnitInfo


class Levels:
    """The layout of every sharding group of a model on hosts, and the groups of two levels."""

    def __init__(
        self, units: Sequence[Unit], hosts: Hosts, facts: Mapping[int, RankOnHost]
    ) -> None:
        """Compute the layouts, the same on all ranks of a group, from the facts of all ranks.

        Raises:
            ValueError: if a unit cannot have the ``hosts`` that the user asks for.
        """
        self._facts = facts
        by_ranks = {ranks_of(unit.group): unit for unit in units}
        # In the same order on all ranks, which may have their units in different orders.
        self._units = {ranks: by_ranks[ranks] for ranks in sorted(by_ranks)}
        self._layouts = {r: _layout(unit, hosts, facts) for r, unit in self._units.items()}
        self._groups: dict[tuple[int, ...], HostGroups] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """For users: how the ranks are laid out on hosts, and why."""
        notes = []
        for ranks, layout in self._layouts.items():
            R = layout.ranks_per_host
            two = f"two levels, {len(ranks) // R} hosts of {R} ranks"
            notes.append(f"hosts: {two if R > 1 else 'every rank sends for itself'} ({layout.why})")
        return tuple(dict.fromkeys(notes))

    def info(self, unit: Unit) -> UnitInfo:
        """The unit's reduce-scatter, with the layout of its ranks on hosts."""
        R = self._layouts[ranks_of(unit.group)].ranks_per_host
        if unit.info.replicated:
            return whole_on_hosts(unit.info, R)
        return replace(unit.info, ranks_per_host=R)

    def gather_info(self, unit: Unit) -> UnitInfo | None:
        """The unit's all-gather, with the layout of its ranks on hosts; None if it cannot be
        replaced."""
        if unit.gather_info is None:
            return None
        return replace(unit.gather_info, ranks_per_host=self.info(unit).ranks_per_host)

    def groups(self, unit: Unit) -> HostGroups | None:
        """This rank's groups for the unit; None if every rank sends for itself."""
        return self._groups.get(ranks_of(unit.group))

    def open(self) -> None:
        """Make the groups; all ranks call it together."""
        for ranks, unit in self._units.items():
            R = self._layouts[ranks].ranks_per_host
            if R > 1:
                self._groups[ranks] = host_groups(unit.group, R, unit.device, self._facts)

    def keep(self, used: Iterable[Unit]) -> None:
        """Destroy the groups that none of the units ``used`` has. All ranks call it together."""
        kept = {ranks_of(unit.group) for unit in used}
        for ranks in [ranks for ranks in self._groups if ranks not in kept]:
            self._groups.pop(ranks).release()

    def release(self) -> None:
        """Destroy the groups."""
        self.keep(())


def _layout(unit: Unit, hosts: Hosts, facts: Mapping[int, RankOnHost]) -> HostLayout:
    layout = layout_of(ranks_of(unit.group), facts, hosts, dist.get_world_size())
    if layout.ranks_per_host == 1 or unit.info.flat is None:
        return layout
    if hosts != "auto":
        raise ValueError(
            f"hosts={hosts}: FSDP1 cuts parameters anywhere, which leaves no rows for hosts; use "
            "FSDP2 (fully_shard), or pass hosts=None"
        )
    return HostLayout(ranks_per_host=1, why="FSDP1 has no rows for hosts")
