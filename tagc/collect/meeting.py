"""Ranks that meet over the store that their processes started with, and not in a collective.

Ranks that come early to a collective of NCCL wait under its watchdog, which ends the job after the
group's timeout. Writing files may take one rank longer than that.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from tagc.collect.agreement import complaint_of

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long the first rank waits for the others; these wait twice as long for its answer."""
_LONGEST_PAUSE = 0.5


class Meeting:
    """Steps that some ranks take together. All of them must take as many, in the same order.

    The first rank hears what the others say, and tells them what came of it: so a rank asks the
    store for little, however many there are.
    """

    def __init__(self, name: str, ranks: Sequence[int], *, doing: str, remedy: str) -> None:
        """Nobody has met.

        Args:
            name: no other meeting's, and the same on all ranks.
            ranks: who meets, among all processes; ascending.
            doing: what is done, for errors.
            remedy: for the error about ranks that are at different steps.
        """
        assert dist.group.WORLD is not None
        self._store = dist.PrefixStore(f"tagc/{name}", dist.group.WORLD.get_group_store())
        self._rank, self._first, self._others = dist.get_rank(), ranks[0], ranks[1:]
        self._doing, self._remedy = doing, remedy
        self._count = 0
        # Why nobody waits for the others any more.
        self._lost: str | None = None

    def together(self, progress: str, do: Callable[[], T]) -> dict[int, T]:
        """Take a step on this rank, and hear how others fared.

        Args:
            progress: which step, equal on all ranks.
            do: returns what can be pickled.

        Returns:
            By rank, what it returned: on the first rank that of all, on others their own.

        Raises:
            Exception: what the step raised on this rank.
            RuntimeError: if it failed on another rank, which is named, or that rank is at another
                step, or does not come in time. After that no step waits for others; all raise.
        """
        mine: dict[str, Any] = {"progress": progress, "error": None, "result": None}
        failure: Exception | None = None
        try:
            mine["result"] = do()
        except Exception as error:
            failure, mine["error"] = error, f"{type(error).__name__}: {error}"
        said, complaint = {self._rank: mine}, self._lost
        if complaint is None:
            try:
                said, complaint = self._meet(mine)
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
        return {rank: answer["result"] for rank, answer in said.items()}

    def _meet(self, mine: dict[str, Any]) -> tuple[dict[int, dict[str, Any]], str | None]:
        """What this rank heard, and what is wrong, the same on all."""
        self._count += 1
        store, answer, read = self._store, f"{self._count}/answer", f"{self._count}/read"
        if self._rank != self._first:
            store.set(f"{self._count}/{self._rank}", _packed(mine))
            self._lost = self._missing({self._first: answer}, 2 * PATIENCE)
            if self._lost is not None:
                return {}, self._lost
            complaint, self._lost = pickle.loads(store.get(answer))
            # Who reads it last removes it.
            if store.add(read, 1) == len(self._others):
                store.delete_key(answer)
                store.delete_key(read)
            return {self._rank: mine}, complaint
        keys = {rank: f"{self._count}/{rank}" for rank in self._others}
        said = {self._rank: mine}
        complaint = self._lost = self._missing(keys, PATIENCE)
        if self._lost is None:
            said |= {rank: pickle.loads(store.get(key)) for rank, key in keys.items()}
            complaint = complaint_of(["progress"], said, self._doing, self._remedy)
            for key in keys.values():
                store.delete_key(key)
        if keys:
            store.set(answer, _packed((complaint, self._lost)))
        return said, complaint

    def _missing(self, keys: Mapping[int, str], patience: timedelta) -> str | None:
        """Wait for what ranks say under these keys; who did not, for people."""
        end, pause = time.monotonic() + patience.total_seconds(), 0.001
        # Not by `wait`, under which other threads of this process cannot use the store.
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


def _packed(said: Any) -> Any:
    return pickle.dumps(said)  # bytes, which a store takes, though torch declares text
