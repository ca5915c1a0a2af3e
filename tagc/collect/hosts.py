"""Ranks that share a host: who they are, and the two groups of each.

The ranks of a sharding group lie host by host: rank ``h * R + r`` is the ``r``-th of host ``h``. It
adds up gradients with the other ranks of its host (``inside``), and exchanges messages with the
ranks ``r`` of the other hosts (``across``).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

Hosts = Literal["auto"] | int | None
"""What a user says about hosts: found by themselves, so many ranks on each, or nothing of it."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """How the ranks of a group lie on hosts.

    Attributes:
        ranks_per_host: so many neighbours share a host; 1 where every rank sends for itself.
        why: for people.
    """

    ranks_per_host: int
    why: str


@dataclass(kw_only=True)
class HostGroups:
    """The two groups of a rank.

    Attributes:
        inside: the ranks of its host.
        across: the ranks with its place on every host.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup
    _key: tuple[Any, ...]
    _users: int = 0

    def release(self) -> None:
        """Destroy both, if nobody else uses them; nothing if the user destroyed all groups.

        Groups of a part of all processes stay, to be used again: torch would give new ones of the
        same ranks their name, and these then wait for what the former ones left behind.
        """
        self._users -= 1
        world, ranks, *_ = self._key
        if self._users or _made.get(self._key) is not self:
            return
        if world is dist.group.WORLD and len(ranks) == dist.get_world_size():
            del _made[self._key]
            for group in (self.inside, self.across):
                dist.destroy_process_group(group)


# Models are wrapped again and again, and not all are unwrapped; groups are sockets and threads. By
# the group of all processes, the ranks of the sharding group, how many of them share a host,
# backend and timeout.
_made: dict[tuple[Any, ...], HostGroups] = {}


def host_identity() -> str:
    """What tells this host from others.

    Containers of one machine share its boot; those with a name of their own each count as a host,
    as they may not reach each other by anything but the network.
    """
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def check_hosts(hosts: Hosts) -> None:
    """Raise for what no group can have.

    Raises:
        ValueError: if ``hosts`` is neither ``"auto"`` nor None nor a positive integer.
    """
    whole = isinstance(hosts, int) and not isinstance(hosts, bool)
    if not (hosts is None or hosts == "auto" or (whole and hosts > 0)):
        raise ValueError(
            f"hosts is {hosts!r}; it must be 'auto', None, or the number of ranks on each host"
        )


def forced_layout(ranks_per_host: int, world_size: int) -> HostLayout:
    """The layout of a group whose user says how many ranks share a host.

    Raises:
        ValueError: if they are not whole hosts.
    """
    if world_size % ranks_per_host:
        raise ValueError(
            f"hosts={ranks_per_host} does not divide the {world_size} ranks that a unit is sharded "
            "over: give the number of ranks that share a host, or hosts=None"
        )
    if ranks_per_host == world_size > 1:
        raise ValueError(
            f"hosts={ranks_per_host} leaves a single host of all {world_size} ranks, which has no "
            "other host to send to: give fewer, or hosts=None"
        )
    return HostLayout(ranks_per_host=ranks_per_host, why=f"hosts={ranks_per_host}")


def found_layout(identities: Sequence[str]) -> HostLayout:
    """The layout of ranks by the hosts that they are on, in the group's order.

    Two levels need at least two hosts of equally many neighbours, at least two.
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
    """What ranks tell each other before they decide how they lie.

    Attributes:
        host: see :func:`host_identity`.
        everywhere, partial: by which torch names new groups that all processes make, and those
            that only their members do.
        made: what it has :class:`HostGroups` of.
        shardings: sharding groups of the model that it is in.
        splits: whether torch makes new groups by splitting that of all processes.
    """

    host: str
    everywhere: int = 0
    partial: int = 0
    made: frozenset[tuple[Any, ...]] = frozenset()
    shardings: int = 1
    splits: bool = False

    @classmethod
    def mine(cls, shardings: int = 1) -> RankOnHost:
        """Of this rank, now."""
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
    ranks: Sequence[int], said: Mapping[int, RankOnHost], hosts: Hosts, processes: int
) -> HostLayout:
    """The layout of a group, the same on all of its ranks.

    Args:
        ranks: those of the group, in its order.
        said: what each of them told.
        processes: in all.

    Raises:
        ValueError: if the user asks for hosts that this group cannot have.
    """
    if hosts is None or len(ranks) == 1:
        return HostLayout(ranks_per_host=1, why="hosts=None" if hosts is None else "a single rank")
    if hosts == "auto":
        layout = found_layout([said[rank].host for rank in ranks])
    else:
        layout = forced_layout(hosts, len(ranks))
    obstacle = _obstacle(ranks, [said[rank] for rank in ranks], processes)
    if layout.ranks_per_host == 1 or obstacle is None:
        return layout
    if hosts != "auto":
        raise ValueError(f"hosts={hosts} is not possible: {obstacle}; give hosts=None")
    return HostLayout(ranks_per_host=1, why=obstacle)


def _obstacle(ranks: Sequence[int], said: Sequence[RankOnHost], processes: int) -> str | None:
    """Why ranks of a group cannot make groups of hosts; None if nothing is in the way."""
    if [*ranks] != sorted(ranks):
        return f"the ranks of the group are not in ascending order: {[*ranks]}"
    everywhere = len(ranks) == processes
    # torch names new groups by how many there are, and ranks that name one differently wait for
    # each other.
    if len({one.everywhere if everywhere else one.partial for one in said}) > 1:
        return "its ranks have made different numbers of process groups before"
    if not everywhere and max(one.shardings for one in said) > 1:
        return "its ranks share the model in several groups of a part of all processes"
    if not everywhere and any(one.splits for one in said):
        return "init_process_group(device_id=...) makes new groups of all processes together only"
    return None


def host_groups(
    group: dist.ProcessGroup,
    ranks_per_host: int,
    device: torch.device,
    said: Mapping[int, RankOnHost],
) -> HostGroups:
    """The two groups of this rank, to be released; all ranks of ``group`` call it together.

    Args:
        said: what each of them told: groups that all of them have are used again.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    options: Any = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    key = (dist.group.WORLD, ranks, ranks_per_host, str(dist.get_backend_config(group)), timeout)
    if not all(key[1:] in said[rank].made for rank in ranks):
        _made[key] = _new_groups(group, key)
    _made[key]._users += 1
    return _made[key]


def _new_groups(group: dist.ProcessGroup, key: tuple[Any, ...]) -> HostGroups:
    _, ranks, R, backend, timeout = key
    host, place = divmod(group.rank(), R)
    everywhere = len(ranks) == dist.get_world_size()

    def made(members: Sequence[tuple[int, ...]], mine: int, name: str) -> dist.ProcessGroup:
        # Where not all processes take part, those of a group make it by themselves. In the same
        # order on all ranks: each waits for the others of its group.
        new = [
            dist.new_group(
                some,
                timeout=timeout,
                backend=backend,
                use_local_synchronization=not everywhere,
                group_desc=f"tagc {name}",
            )
            if everywhere or i == mine
            else None
            for i, some in enumerate(members)
        ]
        own = new[mine]
        assert isinstance(own, dist.ProcessGroup)
        return own

    hosts = [ranks[first : first + R] for first in range(0, len(ranks), R)]
    inside = made(hosts, host, "inside a host")
    across = made([ranks[r::R] for r in range(R)], place, "across hosts")
    return HostGroups(inside=inside, across=across, _key=key)
