"""Exchanges between sites that may die, hang, be cut off and return.

Sites meet before every exchange. A site that is behind gets the anchors of another one and goes on
from there. An exchange counts for all sites or for none: a site moves its anchors only after every
site that was there has answered that it has the averages. If one does not answer, residuals are put
back, and the sites that are left meet again.

A site that has the averages, but not every answer, is *in doubt*: another site may have all answers
and count the exchange. It learns when it meets a site that is ahead: if that one names the exchange
among those that it counts, the residuals are those of after the exchange, otherwise of before.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.attach.torchft import TorchftSites
from tagc.basics.warn import warn
from tagc.collect import (
    Anchor,
    BareTransport,
    DesyncError,
    SiteExchange,
    SitesDifferError,
    gather_by_rank,
    in_turns,
)
from tagc.collect.transport import failing_in
from tagc.handle.site_links import Owed, SiteLinks
from tagc.policy.sites import SitesConfig

# How many of the last exchanges a site can name: more than others count while it is in doubt.
_NAMED = 1024


class ElasticExchange(SiteExchange):
    """Exchanges units between the sites that are there."""

    elastic = True

    def __init__(
        self,
        anchors: Sequence[Anchor],
        config: SitesConfig,
        members: TorchftSites,
        links: SiteLinks,
        identity: str,
        inside: Sequence[dist.ProcessGroup],
    ) -> None:
        """Start with no steps; :meth:`join` comes next.

        Args:
            identity: equal in all sites with the same model and policy.
            inside: the groups that connect the ranks of this site.
        """
        super().__init__(anchors, None, config)
        self._members, self._links, self._identity = members, links, identity
        self._inside = inside
        self._owed = links.owed()
        # The exchanges that this site is in doubt of, and what it owes if they count.
        self._doubts: dict[int, Owed] = {}
        # Fragments of the exchange in progress, and whether this site has trained for it.
        self._now: list[int] = []
        self._active = False
        self._last = [0] * _NAMED
        members.serve(self._sent, self._heal)

    def join(self) -> None:
        """Meet the other sites. If they have exchanged before, continue from them."""
        self._members.fall_behind()
        self._exchange([], active=False)

    def step(self) -> None:
        """Note an optimizer step, and exchange what is due.

        Raises:
            SitesLostError: if this site cannot reach the others.
        """
        self.steps += 1
        due = self._due()
        if due:
            self._exchange(due)

    def exchange_all(self) -> None:
        """Exchange all units now."""
        self._exchange(list(self._places))

    def release(self) -> None:
        """See :meth:`SiteExchange.release`."""
        self._members.forget()
        self._doubts.clear()

    def state(self) -> dict[str, Tensor]:
        """See :meth:`SiteExchange.state`; also which exchanges this site counts."""
        numbers = [self._members.count, *self._last]
        return super().state() | {"counted": torch.tensor(numbers, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`SiteExchange.check_state`."""
        super().check_state(state)
        if "counted" not in state:
            raise ValueError("it is of sites that do not come and go")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`SiteExchange.load_state`. The sites that have counted most go on, and the
        others continue from them."""
        super().load_state(state)
        count, *self._last = state["counted"].tolist()
        self._members.fall_behind(count)

    def _exchange(self, due: list[int], *, active: bool = True) -> None:
        began = time.perf_counter()
        self._now, self._active = due, active
        self._owed = self._links.owed()
        while (error := self._attempt()) is not None:
            self.waits.failed += 1
            warn(f"tagc.sites: an exchange did not count and is tried again: {error}")
        for _ in self._now:
            self._count(0.0)
        self.waits.seconds += time.perf_counter() - began

    def _attempt(self) -> Exception | None:
        """Meet, and exchange. Returns why the exchange does not count; None if it does."""
        self._agree_on_count()
        group = self._members.meet()
        error: Exception | None = None
        name = 0
        try:
            if group is None:
                raise RuntimeError("this site could not connect to the others, or load their state")
            self._connect(group)
            name = self._average(group)
            self._wait_for_all(group)
        except Exception as caught:
            error = caught
        counts = False
        try:
            counts = self._members.commit(error)
        finally:
            if not counts:
                self._put_back(name)
        if counts:
            self._last = [*self._last[1:], name]
            self._doubts.clear()
            self._apply()
            return None
        if error is not None and not _is_of_the_link(error):
            raise error
        return error or RuntimeError("another rank of this site has an error")

    def _put_back(self, name: int) -> None:
        """Owe what this site owed before an attempt that does not count.

        Args:
            name: the name of the exchange, if this site has its averages; else 0.
        """
        if name:
            self._doubts[name] = self._links.owed()
        # With new reducers: what failed may still write to the buffers of these.
        self._connect(self._links.nobody)

    def _agree_on_count(self) -> None:
        """Let all ranks of this site be as far as the one that is furthest behind."""
        if self._inside:
            counts = gather_by_rank(self._inside, {dist.get_rank(): self._members.count})
            if len({*counts.values()}) > 1:
                self._members.fall_behind(min(counts.values()))

    def _apply(self) -> None:
        if not self._active:
            # The parameters that another site sent along have its own progress.
            for anchor in self.anchors:
                anchor.reset()
        for anchor in self._anchors_now():
            anchor.apply(mean=self._together)

    def _connect(self, group: dist.ProcessGroup) -> None:
        if group is self._group:
            return
        reducers = self._links.connect(group, self._owed)
        for anchor, reducer in zip(self.anchors, reducers, strict=True):
            anchor.connect(reducer, group)
        self._group = group

    def _average(self, group: dist.ProcessGroup) -> int:
        """Compare the sites, and average their changes.

        Returns:
            The name of the exchange, the same on all counterparts of this rank; never 0.
        """
        anchors = self._anchors_now()
        for anchor in anchors:
            anchor.take_change(none=not self._active)
        told = [
            1 + secrets.randbelow(2**48),
            int(self._active),
            self.steps,
            *self._now,
            *[-1] * (len(self._fragments) - len(self._now)),
        ]
        numbers = torch.tensor(told, dtype=torch.int64, device="cpu")
        device = self.anchors[0].values.device
        marks = torch.cat([anchor.mark() for anchor in self.anchors])
        with failing_in("comparing the anchors of sites", group):
            mine = torch.cat((numbers.to(device), marks))
            told_by_all, _ = BareTransport(group).gather_values(mine)
        rows = told_by_all.tolist()
        self._check_alike([tuple(row[2:]) for row in rows], group.rank())
        taking_part = sum(row[1] for row in rows)
        if taking_part:
            in_turns((anchor.size, anchor.exchanging()) for anchor in anchors)
            for anchor in anchors if taking_part < group.size() else ():
                assert anchor.change is not None
                anchor.change.mul_(group.size() / taking_part)
            self._links.fold(group)
        return sum(row[0] for row in rows)

    def _check_alike(self, told: list[tuple[int, ...]], site: int) -> None:
        """Raise SitesDifferError unless all sites have the same anchors. Those that differ from
        most of them will continue from them."""
        found = Counter(told)
        if len(found) == 1:
            return
        most = max(found, key=lambda row: (found[row], -told.index(row)))
        if told[site] != most:
            self._members.fall_behind()
        raise SitesDifferError(
            f"tagc: {len(told) - found[most]} of {len(told)} sites have other anchors or another "
            "number of steps than most of them"
        )

    def _wait_for_all(self, group: dist.ProcessGroup) -> None:
        with failing_in("agreeing on the exchange between sites", group):
            BareTransport(group).gather_values(torch.ones(1, dtype=torch.int64, device="cpu"))

    def _anchors_now(self) -> list[Anchor]:
        return [anchor for i in self._now for anchor in self._fragments[i]]

    def _sent(self) -> dict[str, Any]:
        """What a site that is behind needs."""
        return {
            "identity": self._identity,
            "steps": self.steps,
            "now": list(self._now),
            "last": list(self._last),
            "exchanges": [anchor.reducer.counters.all_steps for anchor in self.anchors],
            "anchors": [anchor.values for anchor in self.anchors],
            "momenta": [anchor.momentum for anchor in self.anchors],
        }

    def _heal(self, sent: dict[str, Any]) -> None:
        """Continue from another site. Parameters become the anchors; this site's progress since its
        last exchange is lost, its residuals are not."""
        if sent["identity"] != self._identity:
            raise ValueError(
                f"tagc.sites: this site has {self._identity}, but the others have "
                f"{sent['identity']}: start it with the same model, held over as many ranks, the "
                "same policy and version of tagc"
            )
        for name, owed in self._doubts.items():
            if name in sent["last"]:
                self._owed = owed
        self._doubts.clear()
        for anchor, values, momentum in zip(
            self.anchors, sent["anchors"], sent["momenta"], strict=True
        ):
            anchor.values.copy_(values)
            if anchor.momentum is not None:
                anchor.momentum.copy_(momentum)
        self._owed.exchanges[:] = sent["exchanges"]
        self.steps, self._now, self._last = sent["steps"], list(sent["now"]), list(sent["last"])
        self._active, self._group = False, None
        self.waits.healed += 1


def _is_of_the_link(error: Exception) -> bool:
    """Whether an exchange failed because of other sites, so that another attempt may succeed."""
    kinds = (DesyncError, SitesDifferError, dist.DistError)
    return type(error) is RuntimeError or isinstance(error, kinds)
