"""When the units of a model are exchanged between sites, and how: meet, compare, average, wait,
commit.

Sites of a process group stay the same, so they only compare and average. Sites that come and go may
die, hang, be cut off and return. They meet before every exchange; one that is behind gets the
anchors of another one then, and goes on from there. An exchange counts for all of them or for none:
a site moves its anchors only after every site that was there has answered that it has the averages.
If one does not answer, residuals are put back, and the sites that are left meet again.

A site that has the averages of an exchange, but not the answers of all others, is *in doubt*:
another site may have all answers and count it. It learns when it meets a site that is ahead: if
that one counts the exchange, this site owes what it owed after it, otherwise what it owed before.
"""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.attach.torchft import TorchftSites
from tagc.basics.warn import warn
from tagc.codecs.state import check_counts
from tagc.collect import BareTransport, DesyncError, gather_by_rank
from tagc.collect.transport import Transport, failing_in
from tagc.ops.fingerprint import fingerprint
from tagc.plan import Plan, fragments_of
from tagc.policy.rules import OuterConfig, SitesConfig
from tagc.site.anchor import Anchor, Owed, in_turns

# Why sites of a group compare: before the first step, for an exchange that is due, or for one that
# the program asks for. For sites that come and go all are due.
_FIRST, _DUE, _LAST = range(3)
# A site says how it would name the exchange, whether it has trained for it, and after how many
# steps; then what is compared: the steps again, why, and the fragments.
_COMPARED = 3
# How many of the last exchanges a site can name: more than others count while it is in doubt.
_NAMED = 1024
_MEAN = OuterConfig(rate=1, momentum=0)
# Stands for the number of a parameter that is not finite, if a rank of a site has an error.
_REFUSED = 2**40
_REMEDY = (
    "All sites must begin with the same parameters, and load what was saved together: give every "
    "site the same checkpoint, then call tagc.sites again. (Sites that have trained are equal only "
    "after exchange(): call it before remove(), if tagc.sites is to follow.)"
)
_STEPS_REMEDY = (
    "Did a site skip an optimizer step, as loss scalers do? Let all sites take as many steps "
    "(metrics().steps counts those that count) before they call exchange() or end"
)


@dataclass
class Counts:
    """Counts of exchanges of this rank; see :class:`tagc.site.handle.SiteMetrics`."""

    exchanges: int = 0
    waited: int = 0
    wait_seconds: float = 0.0
    failed: int = 0
    healed: int = 0


class SitesDifferError(RuntimeError):
    """Sites have different anchors, or are at different exchanges."""


@dataclass
class Flight:
    """An attempt to exchange, which may run while training goes on.

    Attributes:
        landing: the optimizer step after which the averages of ``fragments`` are applied.
        loaded: whether the averages come from a checkpoint.
        refused: why this site must not exchange: 0 for each anchor, the number of a parameter that
            is not finite, or ``_REFUSED``, int64; and this rank's own error.
        check: raises if sites differ.
        name, trained: what sites agreed to call the exchange, not 0, and how many have trained for
            it.
        averaged: whether this site has its averages.
        restored: whether this site owes again what it owed before, because it failed.
    """

    fragments: Sequence[int]
    landing: int
    loaded: bool = False
    refused: tuple[Tensor, ValueError | None] | None = None
    check: Callable[[], None] = lambda: None
    name: int = 0
    trained: int = 0
    averaged: bool = False
    restored: bool = False
    error: BaseException | None = None
    thread: threading.Thread | None = None
    event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        if self.thread is not None and self.thread.is_alive():
            return False
        return self.event is None or self.event.query()

    def join(self) -> None:
        """Wait until it has ended."""
        if self.thread is not None:
            self.thread.join()
        if self.event is not None:
            self.event.synchronize()

    def wait(self) -> None:
        """Wait until it has ended, and raise what it raised."""
        self.join()
        if self.error is not None:
            raise self.error
        self.check()


class SiteExchange:
    """Exchanges units between sites, as the optimizer steps.

    Attributes:
        anchors: the units.
        plan: the plan for the sites that are there.
        group: this rank's counterparts in them; None while they are not known.
        elastic: whether sites come and go.
        sites: number of sites; if they come and go, in the last exchange that counts.
        steps: optimizer steps so far.
        counts: of exchanges of this rank.
    """

    def __init__(
        self,
        anchors: Sequence[Anchor],
        config: SitesConfig,
        sites: dist.ProcessGroup | TorchftSites,
        planned: Callable[[int], Plan],
        identity: str,
        inside: Sequence[dist.ProcessGroup],
        check: Callable[[], None],
    ) -> None:
        """Start with no steps; if sites come and go, :meth:`join` comes next.

        Args:
            sites: this rank's counterparts in all sites, or what knows them.
            planned: the plan for a number of sites.
            identity: equal in all sites with the same model and policy.
            inside: the groups that connect the ranks of this site.
            check: raises ValueError if the parameters are not those of the anchors any more.
        """
        self.anchors, self._config, self._identity = anchors, config, identity
        self._planned, self._inside, self._check = planned, inside, check
        self._fragments = fragments_of([anchor.unit.info for anchor in anchors], config.fragments)
        device = anchors[0].values.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.steps, self._compared = 0, False
        self.counts = Counts()
        # Less delay than the steps between two exchanges: there is one in flight at most.
        self._flight: Flight | None = None
        # The exchange in progress: its fragments, why, after which step, whether this site has
        # trained for it, whether a unit takes and applies its change in its turn, and whether sites
        # have the same parameters after it, whatever the policy's alpha.
        self._now: Sequence[int] = ()
        self._why, self._after, self._active, self._in_turn = _FIRST, 0, True, True
        self._equal = False
        self._members = sites if isinstance(sites, TorchftSites) else None
        self.elastic = self._members is not None
        # If sites come and go: the names of the exchanges that this site counts, the latest at the
        # end, 0 for none; what it owed before the one in progress; and what it owes if those count
        # that it is in doubt of.
        self._counted = [0] * _NAMED
        self._owed: list[Owed] = []
        self._doubts: dict[int, list[Owed]] = {}
        self.group: dist.ProcessGroup | None = None
        if isinstance(sites, TorchftSites):
            self._transport, self.sites = BareTransport(anchors[0].unit.group), 0
            sites.serve(self._sent, self._heal)
        else:
            self.group, self._transport, self.sites = sites, Transport(sites), sites.size()
            for anchor in anchors:
                anchor.reducer.connect(self._transport)
        self.plan = planned(self._transport.size)

    def join(self) -> None:
        """Meet the other sites. If they have exchanged before, continue from them."""
        assert self._members is not None
        self._members.rewind()
        self._exchange((), _DUE, active=False)

    def step(self) -> None:
        """Note an optimizer step: apply the averages that are due, start the exchanges that are."""
        if not (self.elastic or self._compared):
            self._compared = True
            self._exchange((), _FIRST)
        self.steps += 1
        due = self._due()
        # A flight that was loaded may be in the way of what is due.
        if self._flight is not None and (due or self._flight.landing <= self.steps):
            self._land(self._flight)
            if self.elastic:
                return  # it may have healed this site into the exchange that is due at its new step
        if due:
            self._exchange(due, _DUE, delay=0 if self._together else self._config.delay)

    def exchange_all(self) -> None:
        """Exchange all units now, and apply the averages; what is in flight comes first."""
        self._compared = True
        if self._flight is not None:
            self._land(self._flight)
            if not self._active:
                return  # it has healed this site into this exchange of another one
        every = range(len(self._fragments))
        self._exchange(every, _DUE if self.elastic else _LAST, equal=True)

    def settle(self) -> None:
        """Wait for what is in flight, without applying it. If sites come and go, and it failed
        before this one had averages, this site owes what it owed before; it tries again when they
        would be applied."""
        flight = self._flight
        if flight is None:
            return
        if not self.elastic:
            flight.wait()
        flight.join()
        if flight.error is not None and not flight.averaged:
            self._put_back(flight)

    def release(self) -> None:
        """Wait for what is in flight, and drop it, also if it failed: then raise the error, unless
        other sites caused it that may be gone."""
        flight, self._flight = self._flight, None
        if self._members is not None:
            self._members.forget()
        self._doubts.clear()
        try:
            if flight is not None:
                flight.wait()
        except Exception as error:
            if not (self.elastic and _is_of_the_link(error)):
                raise

    def refresh(self) -> None:
        """Start again from the parameters as they are. What is in flight is waited for, and dropped
        with outer momentum and residuals; the count of steps stays."""
        self.settle()
        self._flight = None
        for anchor in self.anchors:
            anchor.restart()

    def state(self) -> dict[str, Tensor]:
        """Optimizer steps, and the step at which each fragment in flight is applied, or -1; if
        sites come and go, also which exchanges this site counts."""
        numbers = [self.steps, *[-1] * len(self._fragments)]
        flight = self._flight
        if flight is not None and not flight.restored:
            for i in flight.fragments:
                numbers[1 + i] = flight.landing
        found = {"steps": numbers}
        if self._members is not None:
            found["counted"] = [self._members.count, *self._counted]
        return {k: torch.tensor(v, dtype=torch.int64, device="cpu") for k, v in found.items()}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        steps, *landings = state["steps"].tolist()
        if len(landings) != len(self._fragments):
            raise ValueError(
                f"it has {len(landings)} fragments, not {len(self._fragments)}: load it with the "
                "policy that it was saved with"
            )
        check_counts("optimizer steps", state["steps"][:1])
        latest, found = steps + self._config.delay, {*landings} - {-1}
        if len(found) > 1 or any(not steps < landing <= latest for landing in found):
            raise ValueError("an average waits for a step at which none is applied")
        if self.elastic and "counted" not in state:
            raise ValueError("it is of sites that do not come and go")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`. If sites come and go,
        those that have counted most go on, and the others continue from them."""
        self.settle()
        self._compared = False
        self.steps, *landings = state["steps"].tolist()
        flying = [i for i, landing in enumerate(landings) if landing != -1]
        self._flight = Flight(flying, max(landings), loaded=True) if flying else None
        if self._members is not None:
            count, *self._counted = state["counted"].tolist()
            self._members.rewind(count)

    @property
    def _together(self) -> bool:
        """Whether this step is one of the first, after which all parameters are averaged."""
        return self.steps <= self._config.together

    def _due(self) -> list[int]:
        """The fragments to exchange after this step."""
        every, parts = self._config.every, len(self._fragments)
        if self._together:
            return list(range(parts))
        return [i for i in range(parts) if self.steps % every == (i + 1) * every // parts % every]

    def _units(self) -> list[int]:
        """The indexes of the units that are exchanged now."""
        return [i for fragment in self._now for i in self._fragments[fragment]]

    def _exchange(
        self,
        due: Sequence[int],
        why: int,
        *,
        active: bool = True,
        delay: int = 0,
        equal: bool = False,
    ) -> None:
        """Exchange these fragments; with a delay, only begin to."""
        began = time.perf_counter()
        self._now, self._why, self._after, self._active = due, why, self.steps, active
        self._equal = equal
        # Changes of all units need much memory: for a delay, or as others may not get the averages.
        self._in_turn = not (delay or self.elastic)
        if self.elastic:
            self._owed = [anchor.owed() for anchor in self.anchors]
        flight = self._begin(delay)
        flies = flight.thread is not None or flight.event is not None
        if flies:
            self._flight = flight
        else:
            self._finish(flight)
        self._count(0 if flies else len(self._now), time.perf_counter() - began)

    def _begin(self, delay: int = 0) -> Flight:
        """Meet, compare, average and wait; with a delay, all but the meeting beside training,
        unless this site or one of its ranks continues from another one."""
        flight = Flight(self._now, self.steps + delay)
        met = self._meet(flight)
        flies = bool(delay) and met
        if delay and self.elastic:
            # On a GPU a thread would need a stream and a device of its own.
            flies = flies and self._active and self._stream is None
            # No rank trains on while another one waits for its vote.
            flies = all(gather_by_rank(self._inside, {dist.get_rank(): flies}).values())
        if not met:
            return flight
        if not flies:
            self._fly(flight)
        elif self._stream is None:
            # Not a daemon: Python would end it inside gloo at exit, and the process with it
            # (SIGABRT). So a script that ends, or raises, waits for the group's timeout at most.
            flight.thread = threading.Thread(
                target=self._fly, args=[flight], name="tagc-sites", daemon=False
            )
            flight.thread.start()
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                self._fly(flight, checks=False)
                flight.event = torch.cuda.Event()
                flight.event.record(self._stream)
        return flight

    def _meet(self, flight: Flight) -> bool:
        """Meet the sites that are there; False, with an error, if this one could not connect to
        them. It may continue from another site."""
        members = self._members
        if members is not None:
            # All ranks of this site are as far as the one that is furthest behind.
            counts = gather_by_rank(self._inside, {dist.get_rank(): members.count})
            if len({*counts.values()}) > 1:
                members.rewind(min(counts.values()))
        if self._active:
            flight.refused = self._refusals()
        if members is None:
            group = self.group
        else:
            if flight.refused is not None:  # others go on without a site that refuses
                why, error = flight.refused
                self._raise_refusal(why[None].cpu(), error)
            group = members.meet()
            flight.fragments = self._now
        try:
            if group is None:
                raise RuntimeError("this site could not connect to the others, or load their state")
            if group is not self.group:
                self.group, self._transport = group, BareTransport(group)
                # A single site sends nothing, and keeps what it owes as between two.
                self.plan = self._planned(max(2, group.size()))
                self._start_over()
            for i in () if self._in_turn else self._units():
                self.anchors[i].take_change(none=not self._active)
        except Exception as error:
            flight.error = error
        return flight.error is None

    def _fly(self, flight: Flight, *, checks: bool = True) -> None:
        """Compare, average and wait for all. Without ``checks`` the host does not wait for the
        device; then the flight is checked when it lands."""
        try:
            flight.check = self._compare(flight)
            if checks:  # before it sends messages that the other sites do not expect
                flight.check()
            self._average(flight)
            flight.averaged = True
            if self.elastic:
                self._wait()
        except BaseException as error:
            flight.error = error

    def _compare(self, flight: Flight) -> Callable[[], None]:
        """Send all sites what this one is about to exchange, and marks and refusals of its anchors.
        The returned function compares them, and names the exchange.

        The message has the same size whatever is exchanged: sites at different exchanges must get
        an error, not wait for each other.
        """
        now = [*self._now, *[-1] * (len(self._fragments) - len(self._now))]
        # Sites that skipped steps may compare at first, and exchange at last, after fewer; but not
        # some of them by the mean, and others by the outer step.
        by_mean = self._why == _LAST and self._together
        after = self._after if self._why == _DUE else -1 - by_mean
        name = 1 + secrets.randbelow(2**48)
        header = [name, int(self._active), self._after, after, self._why, *now]
        size, device = len(header) + 4 * len(self.anchors), self.anchors[0].values.device
        mine = torch.zeros(1, size, dtype=torch.int64, device=device)
        # Filled on the device: a copy from the host would wait for all that the device has to do.
        for place, number in zip(mine[0], header, strict=False):
            place.fill_(number)
        marks = mine[0, len(header) :].view(-1, 4)
        for i in range(len(self.anchors)) if self.elastic else self._checked():
            anchor = self.anchors[i]
            marks[i, 0].fill_(anchor.exchanges)
            marks[i, 1:3].copy_(fingerprint(anchor.values))
        refused, error = flight.refused or (None, None)
        if refused is not None:
            marks[:, 3].copy_(refused)
        transport = self._transport
        everyones = mine.new_empty(transport.size, size)
        with failing_in("comparing the anchors of sites", transport.group):
            transport.gather(everyones, mine).wait()
        flight.trained = transport.size
        copied = None
        if device.type == "cuda":  # the host reads it without waiting for what the device does next
            everyones, copied = everyones.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))

        def check() -> None:
            if copied is not None:
                copied.synchronize()
            at, theirs = everyones[:, : len(header)], everyones[:, len(header) :]
            if self.elastic:
                self._follow_most(everyones[:, _COMPARED:].tolist())
                flight.name, flight.trained = at[:, :2].sum(0).tolist()
            else:
                theirs = theirs.unflatten(1, (-1, 4))
                self._raise_refusal(theirs[:, :, -1], error)
                self._check_equal(at, theirs)

        return check

    def _follow_most(self, sites: list[list[int]]) -> None:
        """Raise if sites differ; then those with other anchors than most continue from these."""
        found = Counter(map(tuple, sites))
        if len(found) > 1:
            assert self._members is not None
            most = max(found, key=lambda one: (found[one], -sites.index([*one])))
            if sites[self._transport.rank] != [*most]:
                self._members.rewind()
            raise SitesDifferError(
                f"tagc: {len(sites) - found[most]} of {len(sites)} sites have other anchors or "
                "another number of steps than most of them"
            )

    def _check_equal(self, at: Tensor, marks: Tensor) -> None:
        """Raise if sites are at different exchanges, or have different anchors."""
        here = self._transport.rank
        differ = (at[:, _COMPARED:] != at[here, _COMPARED:]).any(1)
        for site in differ.nonzero().flatten().tolist()[:1]:
            raise SitesDifferError(
                f"tagc: site {here} is at {_named(at[here])}, but site {site} at "
                f"{_named(at[site])}. {_STEPS_REMEDY}"
            )
        for site, i in (marks != marks[here]).any(2).nonzero().tolist()[:1]:
            raise SitesDifferError(
                f"tagc: the anchor of unit {self.anchors[i].label!r} (of "
                f"{len(self.plan.units[i].info.params)} parameters) in site {here} "
                f"({_in_words(marks[here, i])}) differs from that in site {site} "
                f"({_in_words(marks[site, i])}). {_REMEDY}"
            )

    def _average(self, flight: Flight) -> None:
        """Replace changes by their average over the sites that have trained for the exchange."""
        if flight.trained:
            anchors = [self.anchors[i] for i in self._units()]
            in_turns((a.values.numel(), self._averaging(a, flight.trained)) for a in anchors)

    def _averaging(self, anchor: Anchor, trained: int) -> Iterator[None]:
        if self._in_turn:
            anchor.take_change()
        yield from anchor.averaging(self._transport.size, trained)
        if self._in_turn:
            self._apply_to(anchor)
        if self.elastic:
            anchor.reducer.fold(self._transport.rank, self._transport.size)  # an owner may die

    def _wait(self) -> None:
        """Wait until every site has answered that it has the averages."""
        transport = self._transport
        answers = torch.ones(transport.size, 1, dtype=torch.int64, device="cpu")
        with failing_in("agreeing on the exchange between sites", transport.group):
            transport.gather(answers, answers[:1].clone()).wait()

    def _finish(self, flight: Flight) -> None:
        """Apply the averages if the exchange counts, and until then try again."""
        while (error := self._commit(flight)) is not None:
            self.counts.failed += 1
            warn(f"tagc.sites: an exchange did not count and is tried again: {error}")
            flight = self._begin()
        if not self._in_turn:
            self._apply()

    def _commit(self, flight: Flight) -> Exception | None:
        """Returns why the exchange does not count; None if it does."""
        if self._members is None:
            try:
                flight.wait()
            except BaseException:
                for i in self._units():
                    self.anchors[i].drop_change()
                raise
            return None
        flight.join()
        error = flight.error
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
            self.sites = self._transport.size
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
        if flight.averaged:
            self._doubts[flight.name] = [anchor.owed() for anchor in self.anchors]
        self._start_over()
        for i in self._units():
            self.anchors[i].drop_change()

    def _start_over(self) -> None:
        """Bind all units to the sites that are there, and owe what was set aside."""
        for anchor, plan, owed in zip(self.anchors, self.plan.units, self._owed, strict=True):
            anchor.start_over(plan, self._transport, owed)

    def _apply(self) -> None:
        for i in self._units():
            self._apply_to(self.anchors[i])
        if not self._active:
            # The parameters that another site sent along have its own progress.
            for anchor in self.anchors:
                anchor.unit.write(anchor.values)

    def _apply_to(self, anchor: Anchor) -> None:
        outer, alpha = (_MEAN, 0.0) if self._together else (self._config.outer, self._config.alpha)
        anchor.apply(outer, 0.0 if self._equal else alpha)

    def _land(self, flight: Flight) -> None:
        """Apply the averages of what was in flight."""
        self._flight = None
        late, began = not flight.done or flight.error is not None, time.perf_counter()
        if flight.loaded:
            self._now, self._active, self._equal = flight.fragments, True, False
            if self._members is not None:
                self._members.rewind(self._members.count + 1)
            self._apply()
        else:
            self._finish(flight)
        self._count(len(self._now), time.perf_counter() - began if late else None)

    def _count(self, exchanges: int, seconds: float | None) -> None:
        """Count exchanges of fragments, and how long training waited for them, if it did."""
        self.counts.exchanges += exchanges
        if seconds is not None:
            self.counts.waited += exchanges
            self.counts.wait_seconds += seconds

    def _checked(self) -> Sequence[int]:
        """The indexes of the units that sites compare, and that must be finite."""
        return range(len(self.anchors)) if self._why == _FIRST else self._units()

    def _refusals(self) -> tuple[Tensor, ValueError | None]:
        """See :attr:`Flight.refused`; the same on all ranks of this site, but for the error."""
        values, error = self.anchors[0].values, None
        why = values.new_zeros(len(self.anchors), dtype=torch.int64)
        for i in self._checked():
            why[i].copy_(self.anchors[i].unit.not_finite())
        try:
            self._check()
        except ValueError as found:
            error = found
            why.fill_(_REFUSED)
        for group in self._inside:
            with failing_in("comparing the ranks of a site", group):
                Transport(group).all_reduce(why, dist.ReduceOp.MAX).wait()
        return why, error

    def _raise_refusal(self, why: Tensor, error: ValueError | None) -> None:
        """Raise if any site must not exchange, on all ranks of all sites. ``why`` is on the host,
        ``[sites, anchors]``; ``error`` is this rank's own."""
        if error is not None:
            raise error
        for site, i in why.nonzero().tolist()[:1]:
            number, where = int(why[site, i]), "this site" if len(why) == 1 else f"site {site}"
            if number == _REFUSED:
                raise RuntimeError(
                    f"tagc: a rank of {where} refuses to exchange: look for its error"
                )
            name = self.anchors[i].unit.info.params[number - 1].name
            raise FloatingPointError(
                f"tagc: parameter {name!r} in {where} has a NaN or an infinity. Nothing was "
                "exchanged, and all anchors are as they were. Load a checkpoint on all sites, with "
                "the state of sites, and skip steps whose gradients are not finite"
            )

    def _sent(self) -> dict[str, Any]:
        """What a site that is behind needs."""
        return {
            "identity": self._identity,
            "steps": self.steps,
            "after": self._after,
            "now": list(self._now),
            "counted": list(self._counted),
            "exchanges": [anchor.exchanges for anchor in self.anchors],
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
        pairs = zip(self.anchors, sent["anchors"], sent["momenta"], strict=True)
        for anchor, values, momentum in pairs:
            anchor.values.copy_(values)
            if anchor.momentum is not None:
                anchor.momentum.copy_(momentum)
        for owed, exchanges in zip(self._owed, sent["exchanges"], strict=True):
            owed.exchanges = exchanges
        self.steps, self._now, self._after = sent["steps"], sent["now"], sent["after"]
        self._active, self.group = False, None
        self.counts.healed += 1


def _named(header: Tensor) -> str:
    """An exchange, for users."""
    _, _, steps, _, why, *fragments = header.tolist()
    if why == _FIRST:
        return f"the comparison before its first step (after {steps} steps)"
    part = f" of fragment {fragments[0] + 1} of {len(fragments)}" if -1 in fragments else ""
    if why == _LAST:
        return f"an exchange(){part} after {steps} steps"
    return f"the exchange{part} that is due after {steps} steps"


def _in_words(mark: Tensor) -> str:
    count, *sums, _ = mark.tolist()
    return f"after {count} exchanges, fingerprint {zlib.crc32(repr(sums).encode()):08x}"


def _is_of_the_link(error: BaseException) -> bool:
    """Whether an exchange failed because of other sites, so that another attempt may succeed."""
    kinds = (DesyncError, SitesDifferError, dist.DistError)
    return type(error) is RuntimeError or isinstance(error, kinds)
