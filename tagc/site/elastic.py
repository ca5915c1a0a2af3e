"""Exchanges between sites that may die, hang, be cut off and return.

Sites meet before every exchange. A site that is behind gets the anchors of another one and goes on
from there. An exchange counts for all sites or for none: a site moves its anchors only after every
site that was there has answered that it has the averages. If one does not answer, residuals are put
back, and the sites that are left meet again. With a delay, training goes on between the
meeting and the moment when the averages are applied.

A site that has the averages of an exchange, but not the answers of all others, is *in doubt*:
another site may have all answers and count it. It learns when it meets a site that is ahead: if
that one counts the exchange, the residuals are those of after it, otherwise of before.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.attach.torchft import TorchftSites
from tagc.basics.warn import warn
from tagc.collect import (
    BareTransport,
    DesyncError,
    gather_by_rank,
    in_turns,
)
from tagc.collect.transport import failing_in
from tagc.policy.sites import SitesConfig
from tagc.site.anchor import Anchor
from tagc.site.exchange import Flight, SiteExchange, SitesDifferError, raise_refusal
from tagc.site.reducers import Owed, SiteReducers

# How many of the last exchanges a site can name: more than others count while it is in doubt.
_NAMED = 1024


class SiteLedger:
    """The names of exchanges. Every exchange has another one, the same in all sites.

    Attributes:
        counted: the last exchanges that this site counts, the latest at the end; 0 for none.
        doubts: the exchanges that this site is in doubt of, and what it owes if they count.
    """

    def __init__(self) -> None:
        """Start with no exchange."""
        self.counted: list[int] = [0] * _NAMED
        self.doubts: dict[int, Owed] = {}

    def count(self, name: int) -> None:
        """Count an exchange. Its sites have met, so nothing before it is in doubt any more."""
        self.counted = [*self.counted[1:], name]
        self.doubts.clear()

    def learn(self, counted: Sequence[int]) -> Owed | None:
        """Take over what a site that is ahead counts.

        Returns:
            What this site owes, if that site counts an exchange that this one was in doubt of.
        """
        known = [owed for name, owed in self.doubts.items() if name in counted]
        self.counted = list(counted)
        self.doubts.clear()
        return known[-1] if known else None


@dataclass
class _Attempt(Flight):
    """An attempt to exchange.

    Attributes:
        name: the name of the exchange, the same in all sites; 0 before this site has its averages.
    """

    name: int = 0

    @property
    def has_no_averages(self) -> bool:
        """Whether it failed before this site had them."""
        return bool(self.error) and not self.name


class ElasticExchange(SiteExchange):
    """Exchanges units between the sites that are there."""

    elastic = True

    def __init__(
        self,
        anchors: Sequence[Anchor],
        config: SitesConfig,
        members: TorchftSites,
        links: SiteReducers,
        identity: str,
        inside: Sequence[dist.ProcessGroup],
        check: Callable[[], None],
    ) -> None:
        """Start with no steps; :meth:`join` comes next.

        Args:
            identity: equal in all sites with the same model and policy.
            inside: the groups that connect the ranks of this site.
        """
        super().__init__(anchors, None, config, inside, check)
        self._members, self._links, self._identity = members, links, identity
        self._owed = links.owed()
        self._ledger = SiteLedger()
        self._sites = 0
        # The exchange in progress: its fragments, after which step, and whether this site has
        # trained for it.
        self._now: list[int] = []
        self._after = 0
        self._active = False
        members.serve(self._sent, self._heal)

    @property
    def sites(self) -> int:
        """Number of sites in the last exchange that counts."""
        return self._sites

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
        landing = [i for i, flight in self._flights.items() if flight.landing <= self.steps]
        for i in landing:
            self._land(i)
        # A landing may have healed this site into the exchange that is due at its new step.
        if not landing and (due := self._due()):
            self._exchange(due, delay=0 if self._together else self._config.delay)

    def exchange_all(self) -> None:
        """Exchange all units now; what is in flight comes first."""
        landing = list(self._flights)
        for i in landing:
            self._land(i)
        # A landing may have healed this site into this exchange of another one.
        if not landing or self._active:
            self._exchange(list(self._places))

    def settle(self) -> None:
        """See :meth:`SiteExchange.settle`. If it has no averages because the exchange failed, this
        site owes what it owed before; it tries again when they would be applied."""
        for flight in self._flights.values():
            flight.join()
            if isinstance(flight, _Attempt) and flight.has_no_averages:
                self._put_back(flight)

    def release(self) -> None:
        flights = list(self._flights.values())
        super().release()
        self._members.forget()
        self._ledger.doubts.clear()
        for error in (error for flight in flights for error in flight.error):
            if not _is_of_the_link(error):
                raise error

    def state(self) -> dict[str, Tensor]:
        """See :meth:`SiteExchange.state`; also which exchanges this site counts."""
        numbers = [self._members.count, *self._ledger.counted]
        found = super().state()
        for i, flight in self._flights.items():
            if isinstance(flight, _Attempt) and flight.has_no_averages:
                found["steps"][1 + i] = -1
        return found | {"counted": torch.tensor(numbers, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        if "counted" not in state:
            raise ValueError("it is of sites that do not come and go")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`SiteExchange.load_state`. The sites that have counted most go on, and the
        others continue from them."""
        super().load_state(state)
        count, *self._ledger.counted = state["counted"].tolist()
        self._members.fall_behind(count)

    def _exchange(self, due: list[int], *, active: bool = True, delay: int = 0) -> None:
        began = time.perf_counter()
        self._now, self._active, self._after = due, active, self.steps
        self._owed = self._links.owed()
        attempt = self._begin(delay)
        if attempt.thread is None:
            self._finish(attempt)
            self._count_now(waited=True)
        else:
            self._flights[due[0]] = attempt
        self.waits.seconds += time.perf_counter() - began

    def _land(self, i: int) -> None:
        flight = self._flights.pop(i)
        late, began = not flight.done or bool(flight.error), time.perf_counter()
        if isinstance(flight, _Attempt):
            self._finish(flight)
        else:  # its averages were loaded
            self._now, self._active = [i], True
            self._members.fall_behind(self._members.count + 1)
            self._apply()
        self._count_now(waited=late)
        self.waits.seconds += time.perf_counter() - began

    def _count_now(self, *, waited: bool) -> None:
        self.waits.exchanges += len(self._now)
        self.waits.waited += len(self._now) if waited else 0

    def _begin(self, delay: int = 0) -> _Attempt:
        """Meet, and exchange; if there is a delay, in a thread, unless this site or one of its
        ranks continues from another one."""
        self._agree_on_count()
        if self._active:  # others go on without a site that refuses
            why, error = self._refusals(self._anchors_now())
            raise_refusal(self._anchors_now(), why[None].cpu(), error)
        group = self._members.meet()
        attempt = _Attempt(self.steps + delay)
        try:
            if group is None:
                raise RuntimeError("this site could not connect to the others, or load their state")
            self._connect(group)
            for anchor in self._anchors_now():
                anchor.take_change(none=not self._active)
        except Exception as error:
            attempt.error.append(error)
        # On a GPU a thread would need a stream and a device of its own.
        flies = not attempt.error and self._active and self._stream is None
        if delay and self._inside:
            # No rank trains on while another one waits for its vote.
            flies = all(gather_by_rank(self._inside, {dist.get_rank(): flies}).values())
        if attempt.error or group is None:
            return attempt
        if delay and flies:
            attempt.start(lambda: self._fly_to(group, attempt))
        else:
            self._fly_to(group, attempt)
        return attempt

    def _fly_to(self, group: dist.ProcessGroup, attempt: _Attempt) -> None:
        try:
            attempt.name = self._average(group)
            self._wait_for_all(group)
        except BaseException as error:
            attempt.error.append(error)

    def _finish(self, attempt: _Attempt) -> None:
        """Apply the averages if the exchange counts, and until then try again."""
        while (error := self._commit(attempt)) is not None:
            self.waits.failed += 1
            warn(f"tagc.sites: an exchange did not count and is tried again: {error}")
            attempt = self._begin()
        self._apply()

    def _commit(self, attempt: _Attempt) -> Exception | None:
        """Returns why the exchange does not count; None if it does."""
        attempt.join()
        error = attempt.error[0] if attempt.error else None
        if error is not None and not isinstance(error, Exception):
            raise error
        sites = super().sites
        counts = False
        try:
            counts = self._members.commit(error)
        finally:
            if not counts:
                self._put_back(attempt)
        if counts:
            self._ledger.count(attempt.name)
            self._sites = sites
            return None
        if error is not None and not _is_of_the_link(error):
            raise error
        return error or RuntimeError("another rank of this site has an error")

    def _put_back(self, attempt: _Attempt) -> None:
        """Owe what this site owed before an attempt that does not count. If the site has the
        averages, it is in doubt."""
        if attempt.name:
            self._ledger.doubts[attempt.name] = self._links.owed()
            attempt.name = 0
        # With new reducers: what failed may still write to the buffers of these.
        self._connect(self._links.nobody)

    def _agree_on_count(self) -> None:
        """Let all ranks of this site be as far as the one that is furthest behind."""
        if self._inside:
            counts = gather_by_rank(self._inside, {dist.get_rank(): self._members.count})
            if len({*counts.values()}) > 1:
                self._members.fall_behind(min(counts.values()))

    def _apply(self) -> None:
        for anchor in self._anchors_now():
            anchor.apply(mean=self._together)
        if not self._active:
            # The parameters that another site sent along have its own progress.
            for anchor in self.anchors:
                anchor.reset()

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
        told = [
            1 + secrets.randbelow(2**48),
            int(self._active),
            self._after,
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
            "after": self._after,
            "now": list(self._now),
            "counted": list(self._ledger.counted),
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
        self._owed = self._ledger.learn(sent["counted"]) or self._owed
        for anchor, values, momentum in zip(
            self.anchors, sent["anchors"], sent["momenta"], strict=True
        ):
            anchor.values.copy_(values)
            if anchor.momentum is not None:
                anchor.momentum.copy_(momentum)
        self._owed.exchanges[:] = sent["exchanges"]
        self.steps, self._now, self._after = sent["steps"], list(sent["now"]), sent["after"]
        self._active, self._group = False, None
        self.waits.healed += 1


def _is_of_the_link(error: BaseException) -> bool:
    """Whether an exchange failed because of other sites, so that another attempt may succeed."""
    kinds = (DesyncError, SitesDifferError, dist.DistError)
    return type(error) is RuntimeError or isinstance(error, kinds)
