"""Who shares a host: decided from what ranks say, the same way on all of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from support.distributed import as_on_nccl, on_ranks, run_ranks
from tagc.collect.hosts import (
    RankOnHost,
    check_hosts,
    found_layout,
    host_groups,
    host_identity,
    layout_of,
)


def on(names: str, groups: str = "", **more: Any) -> dict[int, RankOnHost]:
    """A rank for each letter, which names its host."""
    return {
        rank: RankOnHost(name, everywhere=int(groups[rank]) if groups else 1, **more)
        for rank, name in enumerate(names)
    }


@pytest.mark.parametrize(
    ("names", "ranks_per_host", "why"),
    [
        ("aabb", 2, "found"),
        ("aaaabbbb", 4, "found"),
        ("aaaa", 1, "one host"),
        ("abcd", 1, "host of its own"),
        ("abab", 1, "not neighbours"),
        ("aaab", 1, "different numbers of ranks: 3, 1"),
    ],
)
def test_hosts_are_equal_blocks_of_neighbours(names: str, ranks_per_host: int, why: str) -> None:
    layout = found_layout([*names])
    assert layout.ranks_per_host == ranks_per_host
    assert why in layout.why
    assert layout_of(range(len(names)), on(names), "auto", len(names)) == layout


def test_only_ranks_of_the_group_count() -> None:
    hosts = on("aabbaabb")
    for ranks, expected in (([0, 2, 4, 6], 1), ([0, 1, 2, 3], 2), ([0, 1, 6, 7], 2), ([3], 1)):
        assert layout_of(ranks, hosts, "auto", 8).ranks_per_host == expected
    assert layout_of([0, 1, 2, 3], {}, None, 4).ranks_per_host == 1
    assert layout_of([3], {}, 2, 4).ranks_per_host == 1


@pytest.mark.parametrize(
    ("ranks", "text", "why"),
    [
        ([2, 3, 0, 1], on("aabb"), "ascending order"),
        ([0, 1, 2, 3], on("aabb", groups="1121"), "different numbers of process groups"),
        ([0, 1, 4, 5], on("aabbcc", shardings=2), "several sharding groups"),
        ([0, 1, 4, 5], on("aabbcc", splits=True), "device_id"),
    ],
)
def test_what_groups_cannot_be_made_of(
    ranks: list[int], text: dict[int, RankOnHost], why: str
) -> None:
    """Found by themselves, hosts are left out then; asked for, that is an error."""
    layout = layout_of(ranks, text, "auto", len(text))
    assert layout.ranks_per_host == 1
    assert why in layout.why
    with pytest.raises(ValueError, match=why):
        layout_of(ranks, text, 2, len(text))


def test_hosts_that_do_not_fit() -> None:
    for hosts, why in ((3, "does not divide the 4 ranks"), (4, "single host")):
        with pytest.raises(ValueError, match=rf"hosts={hosts}.*{why}.*hosts=None"):
            layout_of([0, 1, 2, 3], on("aabb"), hosts, 4)
    for wrong in (0, -2, True, 2.0, "2", "all"):
        with pytest.raises(ValueError, match="it must be 'auto', None, or the number of ranks"):
            check_hosts(wrong)  # type: ignore[arg-type]


def identity(rank: int) -> str:
    return host_identity()


def test_a_host_is_its_name_and_its_boot() -> None:
    (other,) = run_ranks(identity, 1)  # another process
    assert other == host_identity()
    with patch("socket.gethostname", lambda: "elsewhere"):
        assert host_identity() != other


@on_ranks(4)
def test_a_backend_that_splits_takes_two_calls(rank: int, world_size: int) -> None:
    """One for the groups inside hosts, one for those between hosts; both then connect ranks."""
    world, cpu = dist.group.WORLD, torch.device("cpu")
    assert world is not None
    calls: list[list[list[int]]] = []

    def split(parent: Any, parts: list[list[int]], **options: Any) -> Any:
        assert parent is world
        calls.append(parts)
        made = [dist.new_group(part) for part in parts]
        return next(group for group in made if isinstance(group, dist.ProcessGroup))

    text = {rank: RankOnHost("a", splits=True) for rank in range(world_size)}
    with (
        as_on_nccl(),
        patch.object(type(world._get_backend(cpu)), "supports_splitting", True),
        patch.object(dist, "split_group", split),
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
    ):
        groups = host_groups(world, 2, cpu, text)
    assert calls == [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    host, place = divmod(rank, 2)
    assert dist.get_process_group_ranks(groups.inside) == [2 * host, 2 * host + 1]
    assert dist.get_process_group_ranks(groups.across) == [place, place + 2]
    assert [call.kwargs["group"] for call in reduced.mock_calls] == [groups.inside, groups.across]
    groups.release()
