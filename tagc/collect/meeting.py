"""Synchronizes ranks through the process group's store instead of a collective.

A rank that waits in an NCCL collective is under its watchdog, which ends the job after the group's
timeout. Another rank may take longer than that to write its files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tagc.collect.agree import complaint_of

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long the first rank waits for the others. They wait twice as long for its answer."""
_LONGEST_PAUSE = 0.5


class Meeting:
    """Steps that some ranks take together, the same number on all of them, in the same order.

    The first rank reads the answers of the others and writes the outcome for them. So the other
    ranks' requests to the store do not grow with the number of ranks.
    """

    def __init__(self, name: str, ranks: Sequence[int], *, doing: str, remedy: str) -> None:
        """Start before the first step.

        Args:
            name: unique among meetings, and the same on all ranks.
            ranks: the ranks that meet, among all processes; ascending.
            doing: names the operation in errors.
            remedy: ends the error about ranks that are at different steps.
        """
        assert dist.group.WORLD is not None
        self._store = dist.PrefixStore(f"tagc/{name}", dist.group.WORLD.get_group_store())
        self._rank, self._first, self._others = dist.get_rank(), ranks[0], ranks[1:]
        self._doing, self._remedy = doing, remedy
        self._count = 0
        # Why this rank no longer waits for the others; None while it does.
        self._lost: str | None = None

    def together(self, progress: str, do: Callable[[], T]) -> dict[int, T]:
        """Take a step on this rank, and wait for the others' outcome.

        Args:
            progress: names the step; equal on all ranks.
            do: the step; its result must be JSON on all ranks but the first.

        Returns:
            Results by rank: the first rank gets all, every other rank only its own.

        Raises:
            Exception: the step's error on this rank.
            RuntimeError: if the step failed on another rank, or another rank is at another step or
                does not come in time. After a rank did not come, no step waits; all raise.
        """
        mine: dict[str, Any] = {"progress": progress, "error": None, "result": None}
        failure: Exception | None = None
        try:
            mine["result"] = do()
        except Exception as error:
            failure, mine["error"] = error, f"{type(error).__name__}: {error}"
        answers, complaint = {self._rank: mine}, self._lost
        if complaint is None:
            try:
                answers, complaint = self._meet(mine)
            except RuntimeError as error:
                complaint = self._lost = (
                    f"{self._doing} failed on rank {self._rank}: the store of the process group "
                    f"does not answer ({error}); did the process that keeps it end? Look for the "
                    "first error among all ranks"
                )
        if failure is not None:
            raise failure
        if complaint is not None:
            raise RuntimeError(complaint)
        return {rank: answer["result"] for rank, answer in answers.items()}

    def _meet(self, mine: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], str | None]:
        """The answers that this rank knows, and the problem, the same on all ranks."""
        self._count += 1
        store, answer, read = self._store, f"{self._count}/answer", f"{self._count}/read"
        if self._rank != self._first:
            store.set(f"{self._count}/{self._rank}", json.dumps(mine))
            self._lost = self._missing({self._first: answer}, 2 * PATIENCE)
            if self._lost is not None:
                return {}, self._lost
            complaint, self._lost = json.loads(store.get(answer))
            # The last reader deletes it.
            if store.add(read, 1) == len(self._others):
                store.delete_key(answer)
                store.delete_key(read)
            return {self._rank: mine}, complaint
        keys = {rank: f"{self._count}/{rank}" for rank in self._others}
        answers = {self._rank: mine}
        complaint = self._lost = self._missing(keys, PATIENCE)
        if self._lost is None:
            answers |= {rank: json.loads(store.get(key)) for rank, key in keys.items()}
            complaint = complaint_of(["progress"], answers, self._doing, self._remedy)
            for key in keys.values():
                store.delete_key(key)
        if keys:
            store.set(answer, json.dumps((complaint, self._lost)))
        return answers, complaint

    def _missing(self, keys: Mapping[int, str], patience: timedelta) -> str | None:
        """Wait until the ranks have set these keys. Return an error that names the ranks that did
        not in time, or None."""
        end, pause = time.monotonic() + patience.total_seconds(), 0.001
        # The store's `wait` would block other threads of this process from using the store.
        while not self._store.check([*keys.values()]):
            if time.monotonic() > end:
                late = [str(rank) for rank, key in keys.items() if not self._store.check([key])]
                return (
                    f"{self._doing} failed: rank {', '.join(late)} did not come within {patience}; "
                    "look for the first error on that rank"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None
