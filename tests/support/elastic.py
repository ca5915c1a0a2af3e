"""Sites that come and go as a script says: a stand-in for ``torchft.Manager``, without servers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Round:
    """One exchange that counts, and the attempts before it.

    Attributes:
        sites: the sites that are there.
        failed: attempts that fail on all of them, after the averages are there.
        doubts: sites that have the averages, but not every answer, in the attempt that counts.
        died: sites that lost everything since they were there last.
    """

    sites: tuple[int, ...]
    failed: int = 0
    doubts: tuple[int, ...] = ()
    died: tuple[int, ...] = ()


class ScriptedManager:
    """What tagc uses of a ``torchft.Manager``, for one rank of one site.

    Attributes:
        now: index of the round in progress.
        seconds: for which a site waits for another.
    """

    seconds = 20.0
    _use_async_quorum, _init_sync, _healing, _quorum_retries = False, True, False, 1

    def __init__(
        self, script: Sequence[Round], site: int, shard: int, shards: int, run: str = ""
    ) -> None:
        """Start before the first round.

        Args:
            run: names one of several runs in one test.
        """
        self._run = run
        self._script, self._site, self._shard, self._shards = script, site, shard, shards
        self.now, self._tries = 0, 0
        self._count, self._error = 0, None
        self._pg = self
        self._group: Any = None
        self._states: dict[str, tuple[Callable, Callable]] = {}

    @property
    def parent(self) -> Any:
        return self._group

    def getBackendName(self) -> str:  # noqa: N802
        return "torchft-gloo"

    def register_state_dict_fn(self, key: str, load: Callable, send: Callable) -> None:
        assert key not in self._states
        self._states[key] = load, send

    def start_quorum(self) -> None:
        self._error = None
        while self._site not in self.round.sites:
            self.now += 1
        sites, site = self.round.sites, self.round.sites.index(self._site)
        store = self._store(f"meets {self._shard}")
        if self._other_sites():
            self._group = bare_group(store, site, len(sites), self.seconds)
        store.set(f"count of {site}", str(self._count))
        counts = [int(store.get(f"count of {i}")) for i in range(len(sites))]
        source = counts.index(max(counts))
        # At first all but one begin from that one.
        behind = [i for i, n in enumerate(counts) if n < max(counts) or (n == 0 and i != source)]
        if behind and site == source:
            sent = {key: send() for key, (_, send) in self._states.items()}
            store.set("state", pickle.dumps(sent).hex())
        if site in behind:
            self._count = max(counts)
            sent = pickle.loads(bytes.fromhex(store.get("state").decode()))
            for key, (load, _) in self._states.items():
                load(sent[key])

    def _other_sites(self) -> bool:
        """Whether these are not the sites of the last exchange, or something failed since."""
        before = self._script[self.now - 1] if self.now else None
        return (
            self._tries > 0
            or before is None
            or before.sites != self.round.sites
            or bool(before.failed or before.doubts or self.round.died)
        )

    def _store(self, name: str) -> dist.Store:
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"{self._run} {name} {self.now} {self._tries}", store)

    @property
    def round(self) -> Round:
        return self._script[self.now]

    def fails(self, where: str) -> bool:
        """Whether the attempt in progress fails here, on this site."""
        if where == "averages":
            return self._tries < self.round.failed
        # In a site with several ranks only the first one lacks an answer.
        doubts = self._site in self.round.doubts and self._shard == 0
        return doubts and self._tries == self.round.failed

    def errored(self) -> Any:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error

    def should_commit(self) -> bool:
        store = self._store(f"votes {self._site}")
        store.set(str(self._shard), str(int(self._error is None)))
        # Every rank waits for all votes, as torchft's do.
        votes = [int(store.get(str(shard))) for shard in range(self._shards)]
        counts = all(votes)
        self._count += counts
        if self._tries < self.round.failed:
            self._tries += 1
        else:
            self.now, self._tries = self.now + 1, 0
        return counts

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._count = state["step"]

    def current_step(self) -> int:
        return self._count


def bare_group(store: dist.Store, rank: int, ranks: int, seconds: float = 20) -> dist.ProcessGroup:
    """A group of gloo that torch does not know, as torchft makes it."""
    group = dist.ProcessGroup(store, rank, ranks)
    backend = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=seconds))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
