"""A site that follows a script, and the accounts of all sites."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.elastic import Round, ScriptedManager
from support.site_net import FOUR_BITS, adam, inside, policy, train
from tagc.ops.fingerprint import fingerprint

OUTER = {"rate": 0.7, "momentum": 0.5}
POLICY = policy(FOUR_BITS, every=2, outer=OUTER)
DELAYED = policy(FOUR_BITS, every=6, fragments=2, delay=2, alpha=0.25, outer=OUTER)


class ElasticSite:
    """One rank of a site.

    Attributes:
        came_in: changes of every unit, by the name of the exchange.
        averages: averages, in the same way, and whether this site had trained for them.
        counted: names of the exchanges that this site counts.
        marks: the step of the exchange and fingerprints of all anchors, after each round.
        lost: what this site owed when it died, by unit.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        script: Sequence[Round],
        rules: Any,
        kind: str = "one device",
        run: str = "",
    ) -> None:
        self.rank, self.world_size, self.script = rank, world_size, script
        self.rules, self.kind = rules, kind
        shards = 1 if kind == "one device" else 2
        self.site, self.shard = rank // shards, rank % shards
        self.manager = ScriptedManager(script, self.site, self.shard, shards, run)
        self.came_in: dict[int, list[Tensor]] = {}
        self.averages: dict[int, tuple[bool, list[Tensor]]] = {}
        self.counted: set[int] = set()
        self.marks: dict[int, list[int]] = {}
        self.lost: list[Tensor] = []
        self.name = 0

    def run(self) -> None:
        """Follow the script to its end."""
        self.start()
        while (now := self.manager.now) < len(self.script):
            if self.site not in self.script[now].sites:
                self.manager.now += 1
            elif self.site in self.script[now].died:
                self.lost = [a + b for a, b in zip(self.lost, self.owed(), strict=True)]
                self.manager._count = 0
                self.handle.remove()
                self.start()
            else:
                while self.manager.now == now:
                    step = self.exchange.steps
                    train(self.model, self.optimizer, self.site, range(step, step + 1))

    def start(self) -> None:
        """Join, with nothing kept."""
        self.model, _, _ = inside(self.kind, self.rank, self.world_size)
        self.optimizer = adam(self.model)
        with patch("tagc.site.exchange.SiteExchange.join"):
            self.handle = tagc.sites(self.model, self.optimizer, self.rules, sites=self.manager)
        self.exchange: Any = self.handle.exchange_state
        self.lost = self.lost or [torch.zeros_like(unit) for unit in self.owed()]
        self._watch()
        self.exchange.join()

    def owed(self) -> list[Tensor]:
        """What this rank owes, by unit, in the columns of its buffer; float64."""
        return [a.owed().in_shard()[0].double() for a in self.exchange.anchors]

    def _watch(self) -> None:
        exchange, manager = self.exchange, self.manager
        compare, average = exchange._compare, exchange._average
        wait, finish = exchange._wait, exchange._finish
        vote = ScriptedManager.should_commit
        taken: dict[int, Tensor] = {}

        for i, anchor in enumerate(exchange.anchors):

            def noted(
                i: int = i, anchor: Any = anchor, take: Any = anchor.take_change, none: bool = False
            ) -> None:
                take(none=none)
                taken[i] = anchor.change.double()

            anchor.take_change = noted

        def compared(flight: Any) -> Any:
            check = compare(flight)

            def checked() -> None:
                check()
                self.name = flight.name

            return checked

        def averaged(flight: Any) -> None:
            changes = {i: taken.pop(i) for i in list(taken)}
            average(flight)
            nothing = [torch.zeros_like(a.values, dtype=torch.float64) for a in exchange.anchors]
            pairs = list(enumerate(zip(exchange.anchors, nothing, strict=True)))
            self.came_in[self.name] = [changes.get(i, n) for i, (_, n) in pairs]
            given = [a.change.double() if i in changes else n for i, (a, n) in pairs]
            self.averages[self.name] = exchange._active, given
            if manager.fails("averages"):
                raise RuntimeError("a site died")

        def waited() -> None:
            wait()
            if manager.fails("answers"):
                raise RuntimeError("an answer is missing")

        def voted() -> bool:
            counts = vote(manager)
            if counts:
                self.counted.add(self.name)
            return counts

        def finished(attempt: Any) -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "tagc.sites: an exchange did not count")
                finish(attempt)
            marks = [n for a in exchange.anchors for n in fingerprint(a.values).tolist()]
            self.marks[manager.now] = [exchange._after, *marks]

        exchange._compare, exchange._average = compared, averaged
        exchange._wait, exchange._finish = waited, finished
        manager.should_commit = voted


def joined(rank: int, world_size: int, rules: Any = POLICY, **more: Any) -> ElasticSite:
    """A site that has joined."""
    script = more.pop("script", [Round(tuple(range(world_size)))] * 9)
    site = ElasticSite(rank, world_size, script, rules, **more)
    site.start()
    return site


def check_accounts(site: ElasticSite) -> None:
    """What sites put in is what all were given plus what is owed, and all had the same anchors."""
    mine = (site.came_in, site.averages, site.counted, site.marks, site.owed(), site.lost)
    everyones: list[Any] = [None] * site.world_size
    dist.all_gather_object(everyones, (site.shard, mine))
    sites = [other for shard, other in everyones if shard == site.shard]
    counted = set().union(*(counted for _, _, counted, _, _, _ in sites))
    assert len(counted) >= len(site.script) // 2
    for i, nothing in enumerate(torch.zeros_like(unit) for unit in site.owed()):
        came_in, handed_out, size = nothing.clone(), nothing.clone(), nothing.clone()
        for name in counted:
            there = [
                (came[name][i], averages[name]) for came, averages, *_ in sites if name in came
            ]
            given = [average[i] for _, (_, average) in there]
            assert all(torch.equal(average, given[0]) for average in given)
            came_in += sum((change for change, _ in there), nothing)
            handed_out += given[0] * sum(active for _, (active, _) in there)
            size += sum((change.abs() for change, _ in there), nothing) + given[0].abs() * len(
                there
            )
        owed = sum((owes[i] + lost[i] for *_, owes, lost in sites), nothing)
        # A few roundings in float32 of what was there in each exchange.
        gap = (came_in - handed_out - owed).abs()
        assert bool((gap <= 64 * 2**-24 * size).all()), f"{gap.max():.3g} is lost"
    for now in range(1, len(site.script) + 1):
        found = [marks[now] for _, _, _, marks, _, _ in sites if now in marks]
        assert all(marks == found[0] for marks in found), f"sites differ after round {now}"
