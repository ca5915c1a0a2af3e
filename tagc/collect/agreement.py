"""Steps that must come out the same on every rank, or fail on every rank."""

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
    """Run the steps on this rank, and compare with the others what came of them.

    A rank whose own steps failed takes part, so that the others learn of it instead of hanging
    in their next collective.

    Args:
        groups: those of the ranks that must agree.
        steps: functions that give a result, and a text that must be equal on all ranks.
        doing: what is done, for the message about a rank that failed.
        remedy: for the message about ranks that disagree.

    Returns:
        The results.

    Raises:
        Exception: what a step raised on this rank.
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
    # Once around tells a rank of those it shares a group with; on a mesh of several dimensions the
    # furthest rank is at most as many groups away as there are.
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
    """What all ranks that these groups connect say, by rank.

    Args:
        mine: what this rank says, by its rank among all processes; picklable.
    """
    return gather_merged(groups, mine, lambda _, other: other)


def gather_merged(
    groups: Sequence[dist.ProcessGroup], mine: Mapping[K, V], merge: Callable[[V, V], V]
) -> dict[K, V]:
    """What all ranks that these groups connect say, by key; a rank sends no more for each than one
    value.

    Args:
        mine: what this rank says; picklable.
        merge: makes one of two values for a key. Ranks hear of the same values several times and in
            any order, which must make no difference.
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
    """What is wrong with what ranks said, or heard of others; None if nothing.

    Args:
        names: of texts that must be equal.
        said: by rank, these texts, ``error`` and perhaps ``complaint``.
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
