"""When the units of a model are exchanged between sites, and exchanges that run meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs.state import MAX_COUNT
from tagc.collect import Transport, in_turns
from tagc.collect.transport import failing_in
from tagc.plan import fragments_of
from tagc.policy.rules import SitesConfig
from tagc.site.anchor import Anchor

# Why sites compare anchors: before the first step, for an exchange that is due, or for one that the
# program asks for.
_FIRST, _DUE, _LAST = range(3)
_REMEDY = (
    "All sites must begin with the same parameters, and load what was saved together: give every "
    "site the same checkpoint, then call tagc.sites again"
)
_STEPS_REMEDY = (
    "Did a site skip an optimizer step, as loss scalers do? Let all sites take as many steps "
    "(metrics().steps counts those that count) before they call exchange() or end"
)

Refusals = tuple[Tensor, ValueError | None]
"""Why a site must not exchange: by anchor, int64 ``[anchors]``, 0, the number of a parameter that
is not finite, or ``_REFUSED``; and this rank's own error."""
_REFUSED = 2**40


class SitesDifferError(RuntimeError):
    """Sites have different anchors, or are at different exchanges."""


@dataclass
class ExchangeCounts:
    """Counts of one rank; see :class:`tagc.site.handle.SiteMetrics`."""

    exchanges: int = 0
    waited: int = 0
    seconds: float = 0.0
    failed: int = 0
    healed: int = 0


@dataclass
class Flight:
    """An exchange that may run while training goes on.

    Attributes:
        fragments: what is exchanged.
        landing: the optimizer step after which its averages are applied.
        loaded: whether the averages come from a checkpoint.
        name: the exchange's name, the same in all sites, from when this site has its averages; 0
            before; only if sites come and go.
        restored: whether what this site owed before is owed again, because it failed.
        check: raises if anchors differ; called when it is done.
        error: what it raised.
    """

    fragments: Sequence[int]
    landing: int
    loaded: bool = False
    name: int = 0
    restored: bool = False
    check: Callable[[], None] = lambda: None
    thread: threading.Thread | None = None
    event: torch.cuda.Event | None = None
    error: list[BaseException] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        if self.thread is not None and self.thread.is_alive():
            return False
        return self.event is None or self.event.query()

    @property
    def has_no_averages(self) -> bool:
        """Whether it failed before this site had them."""
        return bool(self.error) and not self.name

    def start(self, work: Callable[[], None]) -> None:
        """Do this in a thread."""
        # Not a daemon: Python would end it inside gloo at exit, and with it the process (SIGABRT).
        # So a script that ends, or raises, waits for it, at most for the group's timeout.
        self.thread = threading.Thread(target=work, name="tagc-sites", daemon=False)
        self.thread.start()

    def join(self) -> None:
        """Wait until it has ended."""
        if self.thread is not None:
            self.thread.join()
        if self.event is not None:
            self.event.synchronize()

    def wait(self) -> None:
        """Wait until it has ended, and raise what it raised."""
        self.join()
        if self.error:
            raise self.error[0]
        self.check()


class SiteExchange:
    """Exchanges units between sites, as the optimizer steps.

    Attributes:
        elastic: whether sites come and go.
        anchors: the units.
        steps: optimizer steps so far.
        counts: counts of exchanges.
    """

    elastic = False

    def __init__(
        self,
        anchors: Sequence[Anchor],
        group: dist.ProcessGroup | None,
        config: SitesConfig,
        inside: Sequence[dist.ProcessGroup],
        check: Callable[[], None],
    ) -> None:
        """Start with no steps.

        Args:
            group: this rank's counterparts in all sites, if they stay the same.
            inside: the groups that connect the ranks of this site.
            check: raises ValueError if the parameters are not those of the anchors any more.
        """
        self.anchors = anchors
        self._config, self._group, self._inside, self._check = config, group, inside, check
        self._fragments = fragments_of([anchor.unit.info for anchor in anchors], config.fragments)
        # Less delay than the steps between two exchanges: there is one in flight at most.
        self._flight: Flight | None = None
        self._compared = False
        device = anchors[0].values.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.steps, self.counts = 0, ExchangeCounts()

    @property
    def sites(self) -> int:
        """Number of sites."""
        return 0 if self._group is None else self._group.size()

    def step(self) -> None:
        """Note an optimizer step: apply the averages that are due, start the exchanges that are."""
        if not self._compared:
            self._compared = True
            every = range(len(self.anchors))
            self._compare(_FIRST, self.steps, every, self._refusals(every))()
        self.steps += 1
        due = self._due()
        # A flight that was loaded may be in the way of what is due.
        if self._flight is not None and (due or self._flight.landing <= self.steps):
            self._land()
        for i in due:
            if self._config.delay and not self._together:
                self._start(i)
            else:
                self._exchange(i, _DUE)

    def exchange_all(self) -> None:
        """Exchange all units now, and apply the averages; what is in flight comes first."""
        self._compared = True
        if self._flight is not None:
            self._land()
        for i in range(len(self._fragments)):
            self._exchange(i, _LAST)

    def settle(self) -> None:
        """Wait for what is in flight, without applying it."""
        if self._flight is not None:
            self._flight.wait()

    def release(self) -> None:
        """Wait for what is in flight, and drop it, also if it failed: then raise the error."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.wait()

    def refresh(self) -> None:
        """Start again from the parameters as they are. What is in flight is waited for, and dropped
        with outer momentum and residuals; the count of steps stays."""
        self.settle()
        self._flight = None
        for anchor in self.anchors:
            anchor.restart()

    def state(self) -> dict[str, Tensor]:
        """Optimizer steps, and the step at which each fragment in flight is applied, or -1."""
        numbers = [self.steps, *[-1] * len(self._fragments)]
        flight = self._flight
        if flight is not None and not flight.has_no_averages:
            for i in flight.fragments:
                numbers[1 + i] = flight.landing
        return {"steps": torch.tensor(numbers, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        steps, *landings = state["steps"].tolist()
        if len(landings) != len(self._fragments):
            raise ValueError(
                f"it has {len(landings)} fragments, not {len(self._fragments)}: load it with the "
                "policy that it was saved with"
            )
        if not 0 <= steps <= MAX_COUNT:
            raise ValueError("the count of optimizer steps is negative, or too large")
        latest, found = steps + self._config.delay, {*landings} - {-1}
        if len(found) > 1 or any(not steps < landing <= latest for landing in found):
            raise ValueError("an average waits for a step at which none is applied")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`."""
        self.settle()
        self._compared = False
        self.steps, *landings = state["steps"].tolist()
        flying = [i for i, landing in enumerate(landings) if landing != -1]
        self._flight = Flight(flying, max(landings), loaded=True) if flying else None

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

    def _anchors_of(self, *fragments: int) -> list[Anchor]:
        return [self.anchors[i] for fragment in fragments for i in self._fragments[fragment]]

    def _exchange(self, i: int, why: int) -> None:
        """Exchange a fragment, while training waits."""
        began, due = time.perf_counter(), self._fragments[i]
        self._compare(why, self.steps, due, self._refusals(due), i)()
        in_turns((a.values.numel(), self._exchanging(a)) for a in self._anchors_of(i))
        self._count(1, time.perf_counter() - began)

    def _exchanging(self, anchor: Anchor) -> Iterator[None]:
        # The change is taken only now, because changes of all units would need much memory.
        anchor.take_change()
        yield from anchor.exchanging()
        anchor.apply(mean=self._together)

    def _start(self, i: int) -> None:
        """Exchange a fragment, while training goes on."""
        refusals = self._refusals(self._fragments[i])  # training uses the groups inside, too
        for anchor in self._anchors_of(i):
            anchor.take_change()
        flight = self._flight = Flight([i], self.steps + self._config.delay)
        after = self.steps  # training goes on
        if self._stream is None:
            flight.start(lambda: self._fly(i, flight, after, refusals))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._fly(i, flight, after, refusals)
            flight.event = torch.cuda.Event()
            flight.event.record(self._stream)

    def _fly(self, i: int, flight: Flight, after: int, refusals: Refusals) -> None:
        try:
            flight.check = self._compare(_DUE, after, self._fragments[i], refusals, i)
            if self._stream is None:
                flight.check()  # before it sends messages that the other sites do not expect
            in_turns((a.values.numel(), a.exchanging()) for a in self._anchors_of(i))
        except BaseException as error:
            flight.error.append(error)

    def _land(self) -> None:
        """Apply the averages in flight."""
        flight, self._flight = self._flight, None
        assert flight is not None
        late, began = not flight.done, time.perf_counter()
        anchors = self._anchors_of(*flight.fragments)
        try:
            flight.wait()
        except BaseException:
            for anchor in anchors:
                anchor.drop_change()
            raise
        self._count(len(flight.fragments), time.perf_counter() - began if late else None)
        for anchor in anchors:
            anchor.apply()

    def _count(self, exchanges: int, seconds: float | None) -> None:
        """Count exchanges of fragments, and how long training waited for them, if it did."""
        self.counts.exchanges += exchanges
        if seconds is not None:
            self.counts.waited += exchanges
            self.counts.seconds += seconds

    def _refusals(self, due: Sequence[int]) -> Refusals:
        """Why this site must not exchange these anchors, the same on all its ranks."""
        error = None
        why = torch.stack([self.anchors[i].unit.not_finite() for i in due])
        try:
            self._check()
        except ValueError as found:
            error = found
            why.fill_(_REFUSED)
        for group in self._inside:
            with failing_in("comparing the ranks of a site", group):
                Transport(group).all_reduce(why, dist.ReduceOp.MAX).wait()
        return why, error

    def _compare(
        self, why: int, after: int, due: Sequence[int], refusals: Refusals, fragment: int = -1
    ) -> Callable[[], None]:
        """Send all sites what this one is about to exchange after how many steps, and the marks and
        refusals of the anchors that are due. The returned function compares them.

        The message has the same size whatever is exchanged: sites at different exchanges must get
        an error, not wait for each other.
        """
        assert self._group is not None
        transport, (refused, error) = Transport(self._group), refusals
        # Sites that skipped steps may compare at first, and exchange at last, after fewer.
        numbers = [why, fragment, after if why == _DUE else -1, after]
        mine = refused.new_zeros(len(numbers) + 4 * len(self.anchors))
        for place, number in zip(mine, numbers, strict=False):
            place.fill_(number)
        places = mine[len(numbers) :].view(-1, 4)
        for i, number in zip(due, refused, strict=True):
            places[i, :3].copy_(self.anchors[i].mark())
            places[i, 3].copy_(number)
        everyones = mine.new_empty(transport.size, mine.numel())
        with failing_in("comparing the anchors of sites", self._group):
            transport.gather(everyones, mine.view(1, -1)).wait()
        everyones, arrived = _on_host(everyones)

        def check() -> None:
            arrived()
            at, marks = (
                everyones[:, : len(numbers)],
                everyones[:, len(numbers) :].unflatten(1, (-1, 4)),
            )
            here = transport.rank
            raise_refusal(self.anchors, marks[:, :, -1], error)
            for site in (at[:, :-1] != at[here, :-1]).any(1).nonzero().flatten().tolist()[:1]:
                raise SitesDifferError(
                    f"tagc: site {here} is at {self._named(*at[here].tolist())}, but site {site} "
                    f"at {self._named(*at[site].tolist())}. {_STEPS_REMEDY}"
                )
            for site, place in (marks != marks[here]).any(2).nonzero().tolist()[:1]:
                raise SitesDifferError(
                    f"tagc: the anchor of unit {self.anchors[place].label!r} in site {here} "
                    f"({_in_words(marks[here, place])}) differs from that in site {site} "
                    f"({_in_words(marks[site, place])}). {_REMEDY}"
                )

        return check

    def _named(self, why: int, i: int, _: int, steps: int) -> str:
        """An exchange, for users."""
        if why == _FIRST:
            return f"the comparison before its first step (after {steps} steps)"
        part = f" of fragment {i + 1} of {len(self._fragments)}" if len(self._fragments) > 1 else ""
        if why == _LAST:
            return f"an exchange(){part} after {steps} steps"
        return f"the exchange{part} that is due after {steps} steps"


def raise_refusal(anchors: Sequence[Anchor], why: Tensor, error: ValueError | None) -> None:
    """Raise if any site must not exchange, on all ranks of all sites. ``why`` is on the host,
    ``[sites, anchors]`` of :data:`Refusals`; ``error`` is this rank's own."""
    if error is not None:
        raise error
    for site, i in why.nonzero().tolist()[:1]:
        number, where = int(why[site, i]), "this site" if len(why) == 1 else f"site {site}"
        if number == _REFUSED:
            raise RuntimeError(f"tagc: a rank of {where} refuses to exchange: look for its error")
        name = anchors[i].unit.info.params[number - 1].name
        raise FloatingPointError(
            f"tagc: parameter {name!r} in {where} has a NaN or an infinity. Nothing was exchanged, "
            "and all anchors are as they were. Load a checkpoint on all sites, with the state of "
            "sites, and skip steps whose gradients are not finite"
        )


def _on_host(t: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """``t`` on the host, where it can be read without waiting for what the device does next; and a
    function that waits until it is there."""
    if t.device.type != "cuda":
        return t, lambda: None
    copy, copied = t.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record(torch.cuda.current_stream(t.device))
    return copy, copied.synchronize


def _in_words(mark: Tensor) -> str:
    count, *sums, _ = mark.tolist()
    return f"after {count} exchanges, fingerprint {sums[0] % 2**32:08x}"
