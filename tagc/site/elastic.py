"""Exchanges between sites that may die, hang, be cut off and return.

An exchange is: meet, compare, average, wait, commit. Sites meet before every one; a site that is
behind gets the anchors of another one then, and goes on from there. An exchange counts for all
sites or for none: a site moves its anchors only after every site that was there has answered that
it has the averages. If one does not answer, residuals are restored, and the sites that are left
meet again. With a delay, training goes on between the meeting and the moment when the averages are
applied.

A site that has the averages of an exchange, but not the answers of all others, is *in doubt*:
another site may have all answers and count it. It learns when it meets a site that is ahead: if
that one counts the exchange, this site owes what it owed after it, otherwise what it owed before.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.attach.torchft import TorchftSites
from tagc.basics.warn import warn
from tagc.collect import BareTransport, DesyncError, gather_by_rank, in_turns
from tagc.collect.transport import failing_in
from tagc.policy.rules import SitesConfig
from tagc.site.anchor import Anchor
from tagc.site.exchange import Flight, SiteExchange, SitesDifferError, raise_refusal
from tagc.site.reducers import Owed, SiteReducers

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
        reducers: SiteReducers,
        identity: str,
        inside: Sequence[dist.ProcessGroup],
        check: Callable[[], None],
    ) -> None:
        """Start with no steps; :meth:`join` comes next. ``identity`` is equal in all sites with the
        same model and policy."""
        super().__init__(anchors, None, config, inside, check)
        self._members, self._reducers, self._identity = members, reducers, identity
        self._sites = 0
        # The names of the exchanges that this site counts, the latest at the end, 0 for none; and
        # what it owes if those that it is in doubt of count.
        self._counted: list[int] = [0] * _NAMED
        self._doubts: dict[int, list[Owed]] = {}
        # The exchange in progress: its fragments, after which step, whether this site has trained
        # for it, and what this site owed before.
        self._now: Sequence[int] = ()
        self._after = 0
        self._active = False
        self._owed = reducers.owed()
        members.serve(self._sent, self._heal)

    @property
    def sites(self) -> int:
        """Number of sites in the last exchange that counts."""
        return self._sites

    def join(self) -> None:
        """Meet the other sites. If they have exchanged before, continue from them."""
        self._members.rewind()
        self._exchange_fragments((), active=False)

    def step(self) -> None:
        """Note an optimizer step, and exchange what is due."""
        self.steps += 1
        due = self._due()
        if self._flight is not None and (due or self._flight.landing <= self.steps):
            # It may heal this site into the exchange that is due at its new step.
            self._land()
        elif due:
            self._exchange_fragments(due, delay=0 if self._together else self._config.delay)

    def exchange_all(self) -> None:
        """Exchange all units now; what is in flight comes first."""
        flies = self._flight is not None
        if flies:
            self._land()
        # The landing may have healed this site into this exchange of another one.
        if not flies or self._active:
            self._exchange_fragments(range(len(self._fragments)))

    def settle(self) -> None:
        """See :meth:`SiteExchange.settle`. If it has no averages because the exchange failed, this
        site owes what it owed before; it tries again when they would be applied."""
        if self._flight is not None:
            self._flight.join()
            if self._flight.has_no_averages:
                self._put_back(self._flight)

    def release(self) -> None:
        flight, self._flight = self._flight, None
        self._members.forget()
        self._doubts.clear()
        if flight is not None:
            flight.join()
            for error in flight.error:
                if not _is_of_the_link(error):
                    raise error

    def state(self) -> dict[str, Tensor]:
        """See :meth:`SiteExchange.state`; also which exchanges this site counts."""
        numbers = [self._members.count, *self._counted]
        counted = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return super().state() | {"counted": counted}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        if "counted" not in state:
            raise ValueError("it is of sites that do not come and go")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`SiteExchange.load_state`. The sites that have counted most go on, and the
        others continue from them."""
        super().load_state(state)
        count, *self._counted = state["counted"].tolist()
        self._members.rewind(count)

    def _exchange_fragments(
        self, due: Sequence[int], *, active: bool = True, delay: int = 0
    ) -> None:
        """Exchange these fragments; with a delay, only begin to."""
        began = time.perf_counter()
        self._now, self._active, self._after = due, active, self.steps
        self._owed = self._reducers.owed()
        flight = self._begin(delay)
        if flight.thread is not None:
            self._flight = flight
            self.counts.seconds += time.perf_counter() - began
            return
        self._finish(flight)
        self._count(len(self._now), time.perf_counter() - began)

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        late, began = not flight.done or bool(flight.error), time.perf_counter()
        if flight.loaded:
            self._now, self._active = flight.fragments, True
            self._members.rewind(self._members.count + 1)
            self._apply()
        else:
            self._finish(flight)
        seconds = time.perf_counter() - began
        self._count(len(self._now), seconds if late else None)

    def _begin(self, delay: int = 0) -> Flight:
        """Meet, compare, average and wait; with a delay, all but the meeting in a thread, unless
        this site or one of its ranks continues from another one."""
        flight = Flight(self._now, self.steps + delay)
        group = self._meet(flight)
        # On a GPU a thread would need a stream and a device of its own.
        flies = bool(delay) and group is not None and self._active and self._stream is None
        if delay and self._inside:
            # No rank trains on while another one waits for its vote.
            flies = all(gather_by_rank(self._inside, {dist.get_rank(): flies}).values())
        if group is not None and flies:
            flight.start(lambda: self._fly_to(group, flight))
        elif group is not None:
            self._fly_to(group, flight)
        return flight

    def _meet(self, flight: Flight) -> dist.ProcessGroup | None:
        """This rank's counterparts in the sites that are there; None, with an error, if this site
        could not connect to them. It may continue from another site."""
        if self._inside:
            # All ranks of this site are as far as the one that is furthest behind.
            counts = gather_by_rank(self._inside, {dist.get_rank(): self._members.count})
            if len({*counts.values()}) > 1:
                self._members.rewind(min(counts.values()))
        if self._active:  # others go on without a site that refuses
            due = [i for fragment in self._now for i in self._fragments[fragment]]
            why, error = self._refusals(due)
            raise_refusal([self.anchors[i] for i in due], why[None].cpu(), error)
        group = self._members.meet()
        try:
            if group is None:
                raise RuntimeError("this site could not connect to the others, or load their state")
            if group is not self._group:
                self._reducers.restore(self._owed, group)
                for anchor, reducer in zip(self.anchors, self._reducers.reducers, strict=True):
                    anchor.reducer, anchor.group = reducer, group
                self._group = group
            for anchor in self._anchors_of(*self._now):
                anchor.take_change(none=not self._active)
        except Exception as error:
            flight.error.append(error)
            return None
        return group

    def _fly_to(self, group: dist.ProcessGroup, flight: Flight) -> None:
        try:
            name, trained = self._compare_with(group)
            self._average(group, trained)
            flight.name = name
            self._wait_for_all(group)
        except BaseException as error:
            flight.error.append(error)

    def _finish(self, flight: Flight) -> None:
        """Apply the averages if the exchange counts, and until then try again."""
        while (error := self._commit(flight)) is not None:
            self.counts.failed += 1
            warn(f"tagc.sites: an exchange did not count and is tried again: {error}")
            flight = self._begin()
        self._apply()

    def _compare_with(self, group: dist.ProcessGroup) -> tuple[int, int]:
        """Compare the sites; return the name of the exchange, the same on all counterparts of this
        rank, never 0, and how many sites have trained for it. If anchors differ, sites with others
        than most will continue from those."""
        now = [*self._now, *[-1] * (len(self._fragments) - len(self._now))]
        numbers = [1 + secrets.randbelow(2**48), int(self._active), self._after, *now]
        marks = [anchor.mark() for anchor in self.anchors]
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(marks[0].device)
        with failing_in("comparing the anchors of sites", group):
            everyones, _ = BareTransport(group).gather_values(torch.cat((mine, *marks)))
        names, active, *others = zip(*everyones.tolist(), strict=True)
        marks_of_sites = list(zip(*others, strict=True))
        found = Counter(marks_of_sites)
        if len(found) > 1:
            most = max(found, key=lambda marks: (found[marks], -marks_of_sites.index(marks)))
            if marks_of_sites[group.rank()] != most:
                self._members.rewind()
            raise SitesDifferError(
                f"tagc: {group.size() - found[most]} of {group.size()} sites have other anchors or "
                "another number of steps than most of them"
            )
        return sum(names), sum(active)

    def _average(self, group: dist.ProcessGroup, trained: int) -> None:
        """Replace changes by their average over the sites that have trained for the exchange."""
        if not trained:
            return
        anchors = self._anchors_of(*self._now)
        in_turns((anchor.values.numel(), anchor.exchanging()) for anchor in anchors)
        for anchor in anchors if trained < group.size() else ():
            assert anchor.change is not None
            anchor.change.mul_(group.size() / trained)
        self._reducers.fold(group)

    def _wait_for_all(self, group: dist.ProcessGroup) -> None:
        with failing_in("agreeing on the exchange between sites", group):
            BareTransport(group).gather_values(torch.ones(1, dtype=torch.int64, device="cpu"))

    def _commit(self, flight: Flight) -> Exception | None:
        """Returns why the exchange does not count; None if it does."""
        flight.join()
        error = flight.error[0] if flight.error else None
        if error is not None and not isinstance(error, Exception):
            raise error
        counts = False
        try:
            counts = self._members.commit(error)
        finally:
            if not counts:
                self._put_back(flight)
        if counts:
            # Its sites have met, so nothing before it is in doubt any more.
            self._counted = [*self._counted[1:], flight.name]
            self._doubts.clear()
            self._sites = super().sites
            return None
        if error is not None and not _is_of_the_link(error):
            raise error
        return error or RuntimeError("another rank of this site has an error")

    def _put_back(self, flight: Flight) -> None:
        """Owe what this site owed before an exchange that does not count. If the site has the
        averages, it is in doubt. Once only: what is loaded afterwards stays."""
        if flight.restored:
            return
        flight.restored = True
        if flight.name:
            self._doubts[flight.name] = self._reducers.owed()
            flight.name = 0
        self._reducers.restore(self._owed)
        for anchor in self._anchors_of(*self._now):
            anchor.drop_change()

    def _apply(self) -> None:
        for anchor in self._anchors_of(*self._now):
            anchor.apply(mean=self._together)
        if not self._active:
            # The parameters that another site sent along have its own progress.
            for anchor in self.anchors:
                anchor.unit.write(anchor.values)

    def _sent(self) -> dict[str, Any]:
        """What a site that is behind needs."""
        return {
            "identity": self._identity,
            "steps": self.steps,
            "after": self._after,
            "now": list(self._now),
            "counted": list(self._counted),
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
        counted = [owed for name, owed in self._doubts.items() if name in sent["counted"]]
        self._owed = counted[-1] if counted else self._owed
        self._counted = list(sent["counted"])
        self._doubts.clear()
        for anchor, values, momentum in zip(
            self.anchors, sent["anchors"], sent["momenta"], strict=True
        ):
            anchor.values.copy_(values)
            if anchor.momentum is not None:
                anchor.momentum.copy_(momentum)
        for owed, exchanges in zip(self._owed, sent["exchanges"], strict=True):
            owed.exchanges = exchanges
        self.steps, self._now, self._after = sent["steps"], sent["now"], sent["after"]
        self._active, self._group = False, None
        self.counts.healed += 1


def _is_of_the_link(error: BaseException) -> bool:
    """Whether an exchange failed because of other sites, so that another attempt may succeed."""
    kinds = (DesyncError, SitesDifferError, dist.DistError)
    return type(error) is RuntimeError or isinstance(error, kinds)
