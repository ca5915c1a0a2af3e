"""Exchanges between sites that may die, hang, be cut off and return.

Sites meet before every exchange. A site that is behind gets the anchors of another one and goes on
from there. An exchange counts for all sites or for none: a site moves its anchors only after every
site that was there has answered that it has the averages. If one does not answer, residuals are put
back, and the sites that are left meet again.

A site that has the averages, but not every answer, is *in doubt*: another site may have all answers
and count the exchange. It learns at the next meeting. If the others are ahead and name the exchange
among the last ones, the site keeps its residuals of after the exchange; otherwise those of before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect import Anchor, BareTransport, DesyncError, SiteExchange, SitesDifferError
from tagc.collect.transport import failing_in
from tagc.handle.site_links import Owed, SiteLinks
from tagc.policy.sites import SitesConfig

# How many of the last exchanges a site can name.
_NAMED = 8


class Membership(Protocol):
    """Which sites there are, and whether this one counts an exchange. All ranks of a site call its
    methods together."""

    def serve(
        self, send: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> None:
        """Say what a site that is behind gets from this one, and how this one loads it."""
        ...

    def meet(self) -> dist.ProcessGroup | None:
        """Wait for the other sites. If this site is behind, load what another one sends.

        Returns:
            This rank's counterparts in the sites that are there; another group object whenever the
            sites are not those of the last meeting, or an exchange failed since then. None if they
            could not connect.

        Raises:
            SitesLostError: if there are no other sites in time.
        """
        ...

    def commit(self, error: Exception | None) -> bool:
        """Whether the exchange counts: no rank of this site has an error."""
        ...

    def fall_behind(self, count: int = 0) -> None:
        """Be a site that has ``count`` exchanges."""
        ...

    @property
    def count(self) -> int:
        """Exchanges of this site that count."""
        ...


class ElasticExchange(SiteExchange):
    """Exchanges units between the sites that are there."""

    elastic = True

    def __init__(
        self,
        anchors: Sequence[Anchor],
        config: SitesConfig,
        members: Membership,
        links: SiteLinks,
        identity: str,
    ) -> None:
        """Start with no steps; :meth:`join` comes next.

        Args:
            identity: equal in all sites with the same model and policy.
        """
        super().__init__(anchors, None, config)
        self._members, self._links, self._identity = members, links, identity
        self._owed = links.owed()
        # The exchange that this site is in doubt of, and what it then owes.
        self._doubt: tuple[int, Owed] | None = None
        # Fragments of the exchange in progress, and whether this site has trained for it.
        self._now: list[int] = []
        self._active = False
        self._last = [0] * _NAMED
        members.serve(self._sent, self._heal)

    def join(self) -> None:
        """Meet the other sites. If they have exchanged before, continue from them."""
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

    def state(self) -> dict[str, Tensor]:
        """See :meth:`SiteExchange.state`; also which exchanges this site counts."""
        numbers = [self._members.count, *self._last]
        return super().state() | {"counted": torch.tensor(numbers, dtype=torch.int64, device="cpu")}

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
        while not self._attempt():
            self.waits.failed += 1
        for _ in self._now:
            self._count(0.0)
        self.waits.seconds += time.perf_counter() - began

    def _attempt(self) -> bool:
        group = self._members.meet()
        # Without a word of it from another site, nobody counts an exchange in doubt.
        self._doubt = None
        error: Exception | None = None
        name = 0
        try:
            if group is None:
                raise RuntimeError("sites could not connect")
            self._connect(group)
            name = self._average(group)
            self._wait_for_all(group)
        except Exception as caught:
            error = caught
        try:
            counts = self._members.commit(error)
        finally:
            if error is not None and not _is_of_the_link(error):
                raise error
        if counts:
            self._last = [*self._last[1:], name]
            for anchor in self._anchors_now():
                anchor.apply(mean=self._together)
            return True
        if name:
            self._doubt = name, self._links.owed()
        # What failed may still write to the buffers of these reducers.
        self._group = None
        return False

    def _connect(self, group: dist.ProcessGroup) -> None:
        if group is self._group:
            return
        for anchor, reducer in zip(
            self.anchors, self._links.connect(group, self._owed), strict=True
        ):
            anchor.connect(reducer, group)
        self._group = group

    def _average(self, group: dist.ProcessGroup) -> int:
        """Compare the sites, and average their changes.

        Returns:
            The name of the exchange, the same on all counterparts of this rank; never 0.
        """
        anchors = self._anchors_now()
        if not self._active:
            # The parameters that another site sent along have its own progress.
            for anchor in self.anchors:
                anchor.reset()
        for anchor in anchors:
            anchor.take_change()
        draw = int(torch.randint(1, 2**48, (), device="cpu", generator=self._random()))
        told = [draw, int(self._active), self.steps, *self._now, *[-1] * self._missing()]
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
            for anchor in anchors:
                anchor.exchange()
                if taking_part < group.size():
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

    def _missing(self) -> int:
        return len(self._fragments) - len(self._now)

    @staticmethod
    def _random() -> torch.Generator:
        """Random numbers that differ from site to site, whatever seed the sites have."""
        generator = torch.Generator(device="cpu")
        generator.seed()
        return generator

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
        if self._doubt is not None and self._doubt[0] in sent["last"]:
            self._owed = self._doubt[1]
        self._doubt = None
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
