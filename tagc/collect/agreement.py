"""Steps that must give the same result on every rank, or fail on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from tagc.collect.transport import failing_in

K = TypeVar("K")
V = TypeVar("V")


def agree_on(
    groups: Sequence[dist.ProcessGroup],
    steps: Mapping[str, Callable[[], tuple[Any, str]]],
    *,
    doing: str = "tagc.wrap",
    remedy: str = "Every rank must call tagc.wrap with the same model, policy and tagc version",
) -> dict[str, Any]:
    """Run the steps on this rank, and compare the outcome with the other ranks.

    A rank that failed takes part in the comparison, so that the others raise instead of hanging
    in their next collective.

    Args:
        groups: the groups that connect the ranks that must agree.
        steps: functions that return a result, and a text that must be equal on all ranks.
        doing: names the operation in the error about a rank that failed.
        remedy: ends the error about ranks that disagree.

    Returns:
        The results, by the names of the steps.

    Raises:
        Exception: the error of a step on this rank.
        RuntimeError: if a step failed on another rank, or ranks disagree.
    """
    results: dict[str, Any] = {}
    mine: dict[str, str | None] = dict.fromkeys(steps)
    failure: Exception | None = None
    try:
        for name, step in steps.items():
            results[name], mine[name] = step()
    except Exception as error:
        failure = error
    mine["error"] = None if failure is None else f"{type(failure).__name__}: {failure}"
    complaint = None
    # Each round informs a rank about the ranks in its groups. On a mesh the furthest rank is at
    # most as many rounds away as there are dimensions, which is the number of groups.
    for _ in groups:
        for group in groups:
            said: list[dict[str, str | None]] = [{} for _ in range(group.size())]
            with failing_in(f"comparing ranks in {doing}", group):
                dist.all_gather_object(said, mine | {"complaint": complaint}, group=group)
            heard = dict(enumerate(said))
            complaint = complaint or complaint_of(steps, heard, doing, remedy)
    if failure is not None:
        raise failure
    if complaint is not None:
        raise RuntimeError(complaint)
    return results


def gather_by_rank(groups: Sequence[dist.ProcessGroup], mine: Mapping[int, Any]) -> dict[int, Any]:
    """Gather values from all ranks that these groups connect, by rank.

    Args:
        mine: this rank's value, by its rank among all processes; picklable.
    """
    return gather_merged(groups, mine, lambda _, other: other)


def gather_merged(
    groups: Sequence[dist.ProcessGroup], mine: Mapping[K, V], merge: Callable[[V, V], V]
) -> dict[K, V]:
    """Merge values from all ranks that these groups connect, by key. A rank sends at most one value
    per key and collective.

    Args:
        mine: this rank's values; picklable.
        merge: merges two values of a key. It must be idempotent and independent of order: ranks
            receive the same values several times and in any order.
    """
    known = dict(mine)
    for _ in groups:  # as in agree_on
        for group in groups:
            said: list[dict[K, V]] = [{} for _ in range(group.size())]
            dist.all_gather_object(said, known, group=group)
            for other in said:
                for key, value in other.items():
                    known[key] = merge(known[key], value) if key in known else value
    return known


def complaint_of(
    names: Iterable[str], said: Mapping[int, Mapping[str, Any]], doing: str, remedy: str
) -> str | None:
    """The first problem in the ranks' answers, in words; None if there is none.

    Args:
        names: keys of the texts that must be equal.
        said: every rank's answer: these texts, ``error``, and perhaps ``complaint``, a problem that
            it heard of from other ranks.
    """
    for rank, other in said.items():
        if other["error"] is not None:
            return f"{doing} failed on rank {rank}: {other['error']}"
    for name in names:
        if len({other[name] for other in said.values()}) > 1:
            listing = ", ".join(f"rank {r} has {o[name]}" for r, o in said.items())
            return f"tagc {name} differs between ranks: {listing}. {remedy}"
    heard = (other.get("complaint") for other in said.values())
    return next((complaint for complaint in heard if complaint), None)
