"""Decides which units add up gradients inside a host first, and makes their process groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from tagc.attach.unit import Unit
from tagc.collect.hosts import HostGroups, HostLayout, Hosts, RankOnHost, host_groups, layout_of
from tagc.plan import UnitInfo


class Levels:
    """The layout of every sharding group of a model on hosts, and the groups of two levels.

    Attributes:
        notes: for users, how the ranks are laid out on hosts, and why.
    """

    def __init__(self, units: Sequence[Unit], hosts: Hosts, said: Mapping[int, RankOnHost]) -> None:
        """Compute the layouts, the same on all ranks of a group; no collective.

        Args:
            said: the host of every rank, by the rank among all processes.

        Raises:
            ValueError: if a unit cannot have the ``hosts`` that the user asks for.
        """
        self._said = said
        by_ranks = {_ranks(unit): unit for unit in units}
        # In the same order on all ranks, which may have their units in different orders.
        self._units = [by_ranks[ranks] for ranks in sorted(by_ranks)]
        self._layouts = {_ranks(unit): _layout(unit, hosts, said) for unit in self._units}
        self._groups: dict[tuple[int, ...], HostGroups] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """See the class."""
        said = {}
        for ranks, layout in self._layouts.items():
            R = layout.ranks_per_host
            text = f"two levels, {len(ranks) // R} hosts of {R} ranks"
            text = text if R > 1 else "every rank sends for itself"
            said[f"hosts: {text} ({layout.why})"] = None
        return tuple(said)

    def info(self, unit: Unit) -> UnitInfo:
        """The unit's reduce-scatter, with the layout of its ranks on hosts."""
        return unit.on_hosts(self._layouts[_ranks(unit)].ranks_per_host)

    def peers(self, unit: Unit) -> int:
        """The number of ranks that exchange the unit's messages."""
        return unit.info.world_size // self.info(unit).ranks_per_host

    def gather_info(self, unit: Unit) -> UnitInfo | None:
        """The unit's all-gather, with the layout of its ranks on hosts; None if it cannot be
        replaced."""
        if unit.gather_info is None:
            return None
        return replace(unit.gather_info, ranks_per_host=self.info(unit).ranks_per_host)

    def groups(self, unit: Unit) -> HostGroups | None:
        """This rank's groups for the unit; None if every rank sends for itself."""
        return self._groups.get(_ranks(unit))

    def open(self) -> None:
        """Make the groups; all ranks call it together."""
        for unit in self._units:
            ranks = _ranks(unit)
            ranks_per_host = self._layouts[ranks].ranks_per_host
            if ranks_per_host > 1:
                self._groups[ranks] = host_groups(
                    unit.group, ranks_per_host, unit.device, self._said
                )

    def keep(self, used: Iterable[Unit]) -> None:
        """Destroy the groups that none of the units ``used`` has. All ranks call it together."""
        kept = {_ranks(unit) for unit in used}
        for ranks in [ranks for ranks in self._groups if ranks not in kept]:
            self._groups.pop(ranks).release()

    def release(self) -> None:
        """Destroy the groups."""
        while self._groups:
            self._groups.popitem()[1].release()


def _ranks(unit: Unit) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(unit.group))


def _layout(unit: Unit, hosts: Hosts, said: Mapping[int, RankOnHost]) -> HostLayout:
    layout = layout_of(_ranks(unit), said, hosts, dist.get_world_size())
    if layout.ranks_per_host == 1 or unit.info.flat is None:
        return layout
    if hosts != "auto":
        raise ValueError(
            f"hosts={hosts}: FSDP1 cuts parameters anywhere, which leaves no rows for hosts; use "
            "FSDP2 (fully_shard), or pass hosts=None"
        )
    return HostLayout(ranks_per_host=1, why="FSDP1 has no rows for hosts")
