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
from tagc.collect.transport import Transport, failing_in
from tagc.collect.turns import in_turns
from tagc.plan import fragments_of
from tagc.policy.sites import SitesConfig
from tagc.site.anchor import Anchor

_FIRST, _DUE, _LAST = range(3)
"""Why sites compare anchors: before the first step, for an exchange that is due, or for one that
the program asks for."""
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
class Waits:
    """Counts of what training waited for and of what went wrong, of this rank.

    Attributes:
        exchanges: exchanges of a fragment that were applied.
        waited: those that training waited for.
        seconds: how long it waited.
        failed: attempts to exchange that did not count; only if sites come and go.
        healed: how often this site continued from another one; only if sites come and go.
    """

    exchanges: int = 0
    waited: int = 0
    seconds: float = 0.0
    failed: int = 0
    healed: int = 0


@dataclass
class Flight:
    """An exchange of one fragment that may run while training goes on.

    Attributes:
        landing: the optimizer step after which its averages are applied.
        check: raises if anchors differ; called when it is done.
        error: what it raised.
    """

    landing: int
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
        """Wait for it.

        Raises:
            Exception: what it raised.
        """
        self.join()
        if self.error:
            raise self.error[0]
        self.check()


class SiteExchange:
    """Exchanges units between sites, as the optimizer steps.

    Attributes:
        elastic: whether sites come and go.
        steps: optimizer steps so far.
        waits: what training waited for.
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
            group: this rank's counterparts in all sites, if they stay the same. With a delay
                nothing else may use it.
            inside: the groups that connect the ranks of this site.
            check: raises ValueError if the parameters are not those of the anchors any more.
        """
        self._config, self._group = config, group
        self._inside, self._check = inside, check
        self.anchors = anchors
        infos = [anchor.reducer.plan.info for anchor in anchors]
        parts = fragments_of(infos, config.fragments)
        self._fragments = [[anchors[i] for i in part] for part in parts]
        self._flights: dict[int, Flight] = {}
        self._compared = False
        device = anchors[0].values.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.steps, self.waits = 0, Waits()

    @property
    def sites(self) -> int:
        """Number of sites."""
        return 0 if self._group is None else self._group.size()

    def step(self) -> None:
        """Note an optimizer step: apply the averages that are due, start the exchanges that are.

        Raises:
            SitesDifferError: if the anchors of the sites differ, or the sites are at different
                exchanges.
        """
        if not self._compared:
            self._compared = True
            self._compare(_FIRST, self.steps, self._refusals(self.anchors))()
        self.steps += 1
        for i, flight in list(self._flights.items()):
            if flight.landing <= self.steps:
                self._land(i)
        for i in self._due():
            self._start(i, delay=0 if self._together else self._config.delay)

    def exchange_all(self) -> None:
        """Exchange all units now, and apply the averages; what is in flight comes first."""
        self._compared = True
        for i in list(self._flights):
            self._land(i)
        for i in self._places:
            self._start(i, delay=0, why=_LAST)

    def settle(self) -> None:
        """Wait for what is in flight, without applying it."""
        for flight in self._flights.values():
            flight.wait()

    def release(self) -> None:
        """Wait for what is in flight, and drop it, also if it failed.

        Raises:
            Exception: what it raised.
        """
        try:
            for flight in self._flights.values():
                flight.join()  # all of them, before one raises
            self.settle()
        finally:
            self._flights.clear()

    def refresh(self) -> None:
        """Start again from the parameters as they are. What is in flight is waited for, and dropped
        with outer momentum and residuals; the count of steps stays."""
        self.settle()
        self._flights.clear()
        for anchor in self.anchors:
            anchor.restart()

    def state(self) -> dict[str, Tensor]:
        """Optimizer steps, and the step at which each fragment in flight is applied, or -1."""
        landings = [f.landing if (f := self._flights.get(i)) else -1 for i in self._places]
        numbers = [self.steps, *landings]
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
        latest = steps + self._config.delay
        if any(landing != -1 and not steps < landing <= latest for landing in landings):
            raise ValueError("an average waits for a step at which none is applied")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`."""
        self.settle()
        self._compared = False
        self.steps, *landings = state["steps"].tolist()
        found = zip(self._places, landings, strict=True)
        self._flights = {i: Flight(landing) for i, landing in found if landing != -1}

    @property
    def _places(self) -> range:
        return range(len(self._fragments))

    @property
    def _together(self) -> bool:
        """Whether this step is one of the first, after which all parameters are averaged."""
        return self.steps <= self._config.together

    def _due(self) -> list[int]:
        """The fragments to exchange after this step."""
        if self._together:
            return list(self._places)
        every, parts = self._config.every, len(self._fragments)
        return [i for i in self._places if self.steps % every == (i + 1) * every // parts % every]

    def _start(self, i: int, delay: int, why: int = _DUE) -> None:
        fragment = self._fragments[i]
        if not delay:
            began = time.perf_counter()
            self._compare(why, self.steps, self._refusals(fragment), i)()
            in_turns((anchor.size, self._exchanging(anchor)) for anchor in fragment)
            self._count(time.perf_counter() - began)
            return
        refusals = self._refusals(fragment)  # here, as training uses the groups inside the site
        for anchor in fragment:
            anchor.take_change()
        flight = self._flights[i] = Flight(self.steps + delay)
        if self._stream is None:
            after = self.steps  # training goes on
            flight.start(lambda: self._fly(i, flight, after, refusals))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._fly(i, flight, self.steps, refusals)
            flight.event = torch.cuda.Event()
            flight.event.record(self._stream)

    def _exchanging(self, anchor: Anchor) -> Iterator[None]:
        # The change is taken only now, because changes of all units would need much memory.
        anchor.take_change()
        yield from anchor.exchanging()
        anchor.apply(mean=self._together)

    def _fly(self, i: int, flight: Flight, after: int, refusals: Refusals) -> None:
        try:
            flight.check = self._compare(_DUE, after, refusals, i)
            if self._stream is None:
                flight.check()  # before it sends messages that the other sites do not expect
            in_turns((anchor.size, anchor.exchanging()) for anchor in self._fragments[i])
        except BaseException as error:
            flight.error.append(error)

    def _land(self, i: int) -> None:
        flight = self._flights.pop(i)
        late, began = not flight.done, time.perf_counter()
        try:
            flight.wait()
        except BaseException:
            for anchor in self._fragments[i]:
                anchor.drop_change()
            raise
        self._count(time.perf_counter() - began if late else None)
        for anchor in self._fragments[i]:
            anchor.apply()

    def _count(self, seconds: float | None) -> None:
        self.waits.exchanges += 1
        if seconds is not None:
            self.waits.waited += 1
            self.waits.seconds += seconds

    def _refusals(self, anchors: Sequence[Anchor]) -> Refusals:
        """Why this site must not exchange, the same on all its ranks."""
        error = None
        try:
            self._check()
        except ValueError as found:
            error = found
        why = torch.stack([anchor.spoiled() for anchor in anchors])
        if error is not None:
            why.fill_(_REFUSED)
        for group in self._inside:
            with failing_in("comparing the ranks of a site", group):
                Transport(group).all_reduce(why, dist.ReduceOp.MAX).wait()
        return why, error

    def _compare(self, why: int, after: int, refusals: Refusals, i: int = -1) -> Callable[[], None]:
        """Send all sites what this one is about to exchange, and the marks of the anchors in it.
        The returned function compares them.

        The message has the same size whatever is exchanged: sites at different exchanges must get
        an error, not wait for each other.

        Args:
            after: optimizer steps so far.
            refusals: of the anchors of the fragment.
            i: the fragment; -1 for all.
        """
        assert self._group is not None
        transport, (refused, error) = Transport(self._group), refusals
        due = self.anchors if i == -1 else self._fragments[i]
        # Sites that skipped steps may compare at first, and exchange at last, after fewer.
        told = [why, i, after if why == _DUE else -1, after]
        mine = self.anchors[0].values.new_zeros(
            len(told) + 4 * len(self.anchors), dtype=torch.int64
        )
        for place, number in zip(mine, told, strict=False):
            place.fill_(number)
        places = {
            id(a): p for a, p in zip(self.anchors, mine[len(told) :].view(-1, 4), strict=True)
        }
        for anchor, number in zip(due, refused, strict=True):
            places[id(anchor)][:3].copy_(anchor.mark())
            places[id(anchor)][3].copy_(number)
        everyones = mine.new_empty(transport.size, mine.numel())
        with failing_in("comparing the anchors of sites", self._group):
            transport.gather(everyones, mine.view(1, -1)).wait()
        everyones, arrived = _on_host(everyones)

        def check() -> None:
            arrived()
            at, marks = everyones[:, : len(told)], everyones[:, len(told) :].unflatten(1, (-1, 4))
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
                    f"({_spelled(marks[here, place])}) differs from that in site {site} "
                    f"({_spelled(marks[site, place])}). {_REMEDY}"
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
    """Raise if any site must not exchange, on all ranks of all sites.

    Args:
        why: ``[sites, anchors]``, of :data:`Refusals`, on the host.
        error: this rank's own.
    """
    if error is not None:
        raise error
    for site, i in why.nonzero().tolist()[:1]:
        number, where = int(why[site, i]), "this site" if len(why) == 1 else f"site {site}"
        if number == _REFUSED:
            raise RuntimeError(f"tagc: a rank of {where} refuses to exchange: look for its error")
        name = anchors[i].reducer.plan.info.params[number - 1].name
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


def _spelled(mark: Tensor) -> str:
    count, *sums, _ = mark.tolist()
    return f"after {count} exchanges, fingerprint {sums[0] % 2**32:08x}"
