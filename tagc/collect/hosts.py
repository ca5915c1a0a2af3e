"""Finds ranks that share a host, and makes each rank's two groups.

The ranks of a sharding group are ordered host by host: rank ``h * R + r`` is the ``r``-th of host
``h``. It adds up gradients with the other ranks of its host (group ``inside``), and exchanges
messages with the ranks ``r`` of the other hosts (group ``across``).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tagc.collect.transport import Transport, backend_of, timeout_of

Hosts = Literal["auto"] | int | None
"""The argument ``hosts``: find hosts, this many ranks on each, or send from every rank itself."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """How many neighbours of a group share a host, 1 if every rank sends for itself; and why, as
    text for users."""

    ranks_per_host: int
    why: str


@dataclass(kw_only=True)
class HostGroups:
    """The two groups of a rank: the ranks of its host, and those with its place on every host."""

    inside: dist.ProcessGroup
    across: dist.ProcessGroup
    _key: tuple[Any, ...]
    _users: int = 0

    def release(self) -> None:
        """Destroy both groups after their last user; do nothing if the user destroyed all groups.

        Groups of only some of the processes stay, to be used again: torch would reuse their names
        for new groups of the same ranks, and these would wait on keys left by the old ones.
        """
        self._users -= 1
        world, ranks, *_ = self._key
        if self._users or _made.get(self._key) is not self:
            return
        if world is dist.group.WORLD and len(ranks) == dist.get_world_size():
            del _made[self._key]
            for group in (self.inside, self.across):
                dist.destroy_process_group(group)


# Groups are sockets and threads, so models share them: users wrap repeatedly, and don't always
# unwrap. The key: the group of all processes, the ranks of the sharding group, how many of them
# share a host, backend, timeout.
_made: dict[tuple[Any, ...], HostGroups] = {}


def host_identity() -> str:
    """The host's name and boot ID.

    Containers on one machine share its boot ID. Those with different host names count as different
    hosts, because only the network may connect them.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def check_hosts(hosts: Hosts) -> None:
    """Raise ValueError if ``hosts`` is neither ``"auto"`` nor None nor a positive integer."""
    whole = isinstance(hosts, int) and not isinstance(hosts, bool)
    if not (hosts is None or hosts == "auto" or (whole and hosts > 0)):
        raise ValueError(
            f"hosts is {hosts!r}; it must be 'auto', None, or the number of ranks on each host"
        )


def _forced_layout(ranks_per_host: int, world_size: int) -> HostLayout:
    """The layout of a group if the user gives the number of ranks on a host."""
    if world_size % ranks_per_host:
        raise ValueError(
            f"hosts={ranks_per_host} does not divide the {world_size} ranks that a unit is sharded "
            "over: give the number of ranks that share a host, or hosts=None"
        )
    if ranks_per_host == world_size > 1:
        raise ValueError(
            f"hosts={ranks_per_host} puts all {world_size} ranks on a single host, which has no "
            "other host to send to: give fewer, or hosts=None"
        )
    return HostLayout(ranks_per_host=ranks_per_host, why=f"hosts={ranks_per_host}")


def found_layout(identities: Sequence[str]) -> HostLayout:
    """The layout of ranks from their host identities, in the group's order.

    Two levels need at least two hosts, each with the same number of neighbours, at least two.
    """
    world_size, names = len(identities), list(dict.fromkeys(identities))
    ranks_per_host, rest = divmod(world_size, len(names))

    def flat(why: str) -> HostLayout:
        return HostLayout(ranks_per_host=1, why=why)

    if len(names) == 1:
        return flat("all ranks are on one host")
    if ranks_per_host == 1 and not rest:
        return flat("each rank has a host of its own")
    counts = [identities.count(name) for name in names]
    if len(set(counts)) > 1:
        return flat(f"hosts have different numbers of ranks: {', '.join(map(str, counts))}")
    if [name for name in names for _ in range(ranks_per_host)] != list(identities):
        return flat("the ranks of a host are not neighbours in the group")
    return HostLayout(ranks_per_host=ranks_per_host, why="found by the hosts' names")


@dataclass(frozen=True)
class RankOnHost:
    """The facts that a rank tells the others before they decide on a layout.

    Attributes:
        host: see :func:`host_identity`.
        everywhere, partial: the counters from which torch names new groups that all processes make,
            and new groups that only their members make.
        made: keys of the :class:`HostGroups` that the rank has.
        shardings: how many of the model's sharding groups the rank is in.
        splits: whether torch makes new groups by splitting the group of all processes.
    """

    host: str
    everywhere: int = 0
    partial: int = 0
    made: frozenset[tuple[Any, ...]] = frozenset()
    shardings: int = 1
    splits: bool = False

    @classmethod
    def mine(cls, shardings: int = 1) -> RankOnHost:
        """This rank's facts now."""
        for key in [key for key in _made if key[0] is not dist.group.WORLD]:
            del _made[key]  # the user destroyed all groups
        made = frozenset(key[1:] for key in _made)
        world = dist.distributed_c10d._world
        return cls(
            host=host_identity(),
            everywhere=world.group_count,
            partial=len(world.pg_names),
            made=made,
            shardings=shardings,
            splits=getattr(dist.group.WORLD, "bound_device_id", None) is not None,
        )


def layout_of(
    ranks: Sequence[int], facts: Mapping[int, RankOnHost], hosts: Hosts, processes: int
) -> HostLayout:
    """The layout of a group of these ranks, in its order, among all ``processes``; the same on all
    of its ranks.

    Raises:
        ValueError: if this group cannot have the hosts that the user asks for.
    """
    if hosts is None or len(ranks) == 1:
        return HostLayout(ranks_per_host=1, why="hosts=None" if hosts is None else "a single rank")
    if hosts == "auto":
        layout = found_layout([facts[rank].host for rank in ranks])
    else:
        layout = _forced_layout(hosts, len(ranks))
    obstacle = _obstacle(ranks, [facts[rank] for rank in ranks], processes)
    if layout.ranks_per_host == 1 or obstacle is None:
        return layout
    if hosts != "auto":
        raise ValueError(f"hosts={hosts} is not possible: {obstacle}; give hosts=None")
    return HostLayout(ranks_per_host=1, why=obstacle)


def _obstacle(ranks: Sequence[int], facts: Sequence[RankOnHost], processes: int) -> str | None:
    """Why the ranks of a group cannot make groups of hosts; None if they can."""
    if [*ranks] != sorted(ranks):
        return f"the ranks of the group are not in ascending order: {[*ranks]}"
    everywhere = len(ranks) == processes
    # torch names a new group by the number of groups before it. Ranks that give it different names
    # would wait for each other for ever.
    if len({one.everywhere if everywhere else one.partial for one in facts}) > 1:
        return "its ranks have made different numbers of process groups before"
    if not everywhere and max(one.shardings for one in facts) > 1:
        return "its ranks are in several sharding groups, each of only some of the processes"
    if not everywhere and any(one.splits for one in facts):
        return "after init_process_group(device_id=...) only all processes can make new groups"
    return None


def host_groups(
    group: dist.ProcessGroup,
    ranks_per_host: int,
    device: torch.device,
    facts: Mapping[int, RankOnHost],
) -> HostGroups:
    """The two groups of this rank; release them after use. All ranks of ``group`` call it together.
    Groups that all of them already have, by their ``facts``, are used again."""
    ranks = tuple(dist.get_process_group_ranks(group))
    backend = group._get_backend(device)
    timeout = timeout_of(group, device)
    key = (dist.group.WORLD, ranks, ranks_per_host, backend_of(group), timeout)
    if not all(key[1:] in facts[rank].made for rank in ranks):
        splits = getattr(backend, "supports_splitting", False)
        splits = splits and all(facts[rank].splits for rank in ranks)
        _made[key] = _new_groups(group, key, by_splitting=splits)
        if not Transport(group).by_messages(device):
            # NCCL connects ranks in the first collective of a group: not in the first step.
            for made in (_made[key].inside, _made[key].across):
                dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=made)
    _made[key]._users += 1
    return _made[key]


def _new_groups(
    group: dist.ProcessGroup, key: tuple[Any, ...], *, by_splitting: bool
) -> HostGroups:
    _, ranks, R, backend, timeout = key
    places = range(len(ranks))
    everywhere = len(ranks) == dist.get_world_size()

    def made(members: Sequence[Sequence[int]], name: str) -> dist.ProcessGroup:
        """Make a group of each of these sets of places in ``group``; the one of this rank."""
        own: Any = None
        if by_splitting:
            # Keeps the options, such as the priority of streams; one call makes all.
            parts = [list(some) for some in members]
            own = dist.split_group(group, parts, timeout=timeout, group_desc=f"tagc {name}")
        else:
            # If not all processes take part, only the members make a group. All ranks make groups
            # in the same order, because each waits for the others of its group.
            for some in members:
                if everywhere or group.rank() in some:
                    new = dist.new_group(
                        [ranks[place] for place in some],
                        timeout=timeout,
                        backend=backend,
                        use_local_synchronization=not everywhere,
                        group_desc=f"tagc {name}",
                    )
                    own = new if group.rank() in some else own
        assert isinstance(own, dist.ProcessGroup)
        return own

    hosts = [places[first : first + R] for first in range(0, len(ranks), R)]
    inside = made(hosts, "inside a host")
    across = made([places[r::R] for r in range(R)], "across hosts")
    return HostGroups(inside=inside, across=across, _key=key)
