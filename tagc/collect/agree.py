"""Steps that must give the same result on every rank, or fail on every rank.

:func:`agree_on` is for everything that ranks decide before training; :class:`Meeting` compares the
same way through a store, and :class:`Lockstep` compares every collective of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
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
    remedy: str = (
        "Every rank must call tagc.wrap with the same model (and so the same names of "
        "parameters), policy and tagc version"
    ),
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
    texts: dict[str, str] = {}
    failure: Exception | None = None
    try:
        for name, step in steps.items():
            results[name], texts[name] = step()
    except Exception as error:
        failure, texts["error"] = error, f"{type(error).__name__}: {error}"
    # Of ranks with the same text, one is enough to name.
    rank = dist.get_rank() if groups else 0
    mine = dict.fromkeys(texts.items(), rank)
    everyones = gather_merged(groups, mine, min, doing=f"comparing ranks in {doing}")
    if failure is not None:
        raise failure
    answers: dict[int, dict[str, str]] = {}
    for (name, text), rank in sorted(everyones.items(), key=itemgetter(1)):
        answers.setdefault(rank, {})[name] = text
    complaint = complaint_of(steps, answers, doing, remedy)
    if complaint is not None:
        raise RuntimeError(complaint)
    return results


def gather_by_rank(groups: Sequence[dist.ProcessGroup], mine: Mapping[int, Any]) -> dict[int, Any]:
    """Gather picklable values from all ranks that these groups connect, by rank; ``mine`` is this
    rank's, by its rank among all processes."""
    return gather_merged(groups, mine, lambda _, other: other)


def gather_merged(
    groups: Sequence[dist.ProcessGroup],
    mine: Mapping[K, V],
    merge: Callable[[V, V], V],
    *,
    doing: str = "gathering from all ranks",
) -> dict[K, V]:
    """Merge values from all ranks that these groups connect, by key. A rank sends at most one value
    per key and collective.

    Args:
        mine: this rank's values; picklable.
        merge: merges two values of a key. It must be idempotent and independent of order: ranks
            receive the same values several times and in any order.
    """
    known = dict(mine)
    # Each round informs a rank about the ranks in its groups. On a mesh the furthest rank is at
    # most as many rounds away as there are dimensions, which is the number of groups.
    for _ in groups:
        for group in groups:
            parts: list[dict[K, V]] = [{} for _ in range(group.size())]
            with failing_in(doing, group):
                dist.all_gather_object(parts, known, group=group)
            for other in parts:
                for key, value in other.items():
                    known[key] = merge(known[key], value) if key in known else value
    return known


def complaint_of(
    names: Iterable[str], answers: Mapping[int, Mapping[str, Any]], doing: str, remedy: str
) -> str | None:
    """The first problem in the ranks' answers, in words; None if there is none. An answer has texts
    by ``names``, which must be equal where there are any, and under ``error`` why the rank failed.
    """
    for rank, answer in answers.items():
        if answer.get("error") is not None:
            return f"{doing} failed on rank {rank}: {answer['error']}"
    for name in names:
        texts = {rank: answer[name] for rank, answer in answers.items() if name in answer}
        if len(set(texts.values())) > 1:
            listing = ", ".join(f"rank {rank} has {text}" for rank, text in texts.items())
            return f"tagc {name} differs between ranks: {listing}. {remedy}"
    return None
