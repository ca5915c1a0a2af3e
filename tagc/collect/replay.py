"""Binds a program to tensors, operators and transports, and runs it in every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs.workspace import Workspace
from tagc.collect.lockstep import Lockstep
from tagc.collect.transport import CollectiveWork, Transport, failing_in
from tagc.ops import Ops, compiles_ahead
from tagc.ops.implementations import ALIGNED, RecordedLaunches
from tagc.ops.program import Collective, Launch, Level, Operator, Place, Program, Send, Step

_NOTHING = nullcontext()


class Store:
    """The tensors of one unit and direction, by place, and what is in flight. All programs of the
    unit are bound to the same store.

    Attributes:
        flights: collectives that a program started and did not wait for yet.
    """

    def __init__(self, device: torch.device, workspace: Workspace) -> None:
        self.device, self.workspace = device, workspace
        self._on_gpu = device.type == "cuda"
        self._tensors: dict[str, Tensor] = {}
        self.flights: dict[str, CollectiveWork] = {}

    def __getitem__(self, place: Place) -> Tensor:
        """The whole tensor of a place that is not scratch."""
        return self._tensors[place.name]

    def __contains__(self, place: Place) -> bool:
        """Whether a program declared the place."""
        return place.name in self._tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that are not scratch, with their names."""
        return iter(self._tensors.items())

    def declare(self, *places: Place) -> None:
        """Make the tensors that are not scratch, as zeros."""
        for place in places:
            if place.kind in ("kept", "state") and place.name not in self._tensors:
                # Training cannot write to a tensor that an evaluation made in inference mode.
                with torch.inference_mode(False):
                    self._tensors[place.name] = torch.zeros(
                        place.shape, dtype=place.dtype, device=self.device
                    )

    def take(self, place: Place) -> Tensor:
        """The whole tensor of a place. Scratch still holds its last user's content, and every
        stream has flags of its own."""
        if place.kind == "flag":
            return self.workspace.flags.take(self.owner(place))
        if place.kind == "scratch":
            return self.workspace.take(place.name, place.shape, place.dtype)
        return self._tensors[place.name]

    def owner(self, flag: Place) -> Hashable:
        """Whose the flag is, among those of all stores."""
        return self, flag.name

    def drop(self) -> None:
        """Forget what is in flight, after a failure. It may still write to scratch buffers, so
        these are freed, too."""
        self.flights.clear()
        self.workspace.clear()

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph captures the current stream."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    @property
    def stream(self) -> int:
        """The device's current stream."""
        return torch.cuda.current_stream(self.device).cuda_stream if self._on_gpu else 0

    def wait(self, flight: str) -> None:
        """Wait for a collective, if it is in flight."""
        work = self.flights.pop(flight, None)
        if work is not None:
            work.wait()


class _Call(NamedTuple):
    """A call of a replay.

    Attributes:
        step: None for the comparison with other ranks.
        turn: whether other units may take turns before it.
        launches: the function, if it records launches.
        names: of the late tensors among the arguments of such a function, by number.
    """

    step: Step | None
    function: Callable[..., object]
    arguments: list[Any]
    turn: bool = False
    launches: RecordedLaunches | None = None
    names: Mapping[int, str] = MappingProxyType({})


class _Late(NamedTuple):
    """An argument that is a view of a tensor that comes late, or moves.

    Attributes:
        arguments, place: the arguments of a call, and which of them it is.
        name, index: the tensor's name, and the view of it.
        adapted: see :meth:`tagc.ops.program.Operator.adapted`; None if it changes nothing.
        recorded: whether the call records launches, and needs no view when it starts them.
    """

    arguments: list[Any]
    place: int
    name: str
    index: tuple[Any, ...]
    adapted: Callable[[Tensor], Tensor] | None
    recorded: bool


class _Calls:
    """The calls of a program.

    Attributes:
        ranges: names for a profiler, each with its calls.
        late: the arguments that every run sets.
        unnamed: the same calls in one range.
    """

    def __init__(self, ranges: list[tuple[str, list[_Call]]], late: list[_Late]) -> None:
        self.ranges, self.late = ranges, late
        self.unnamed = [("", [call for _, calls in ranges for call in calls])]


class _Records:
    """What recorded operators of a program start on one stream.

    Attributes:
        calls: those of the program, with recorded launches in place of operators.
        stream: their stream.
    """

    def __init__(self, bound: _Calls, stream: int, late: Mapping[str, Tensor]) -> None:
        """``late``: the late tensors of the run that recorded."""
        self.stream = stream
        self._first = {name: tensor.data_ptr() for name, tensor in late.items()}
        self._places: dict[str, list[tuple[list[Any], int]]] = {}
        # Late tensors that may move as far as each other only; None does not move.
        self._tied: set[tuple[str | None, str | None]] = set()
        still = [held for held in bound.late if not held.recorded]
        self.calls = _Calls([(name, list(self._of(calls))) for name, calls in bound.ranges], still)
        self._now = {name: self._first[name] for name in self._places}

    def _of(self, calls: Sequence[_Call]) -> Iterator[_Call]:
        for call in calls:
            launches, names = call.launches, call.names
            if launches is None:
                yield call
                continue
            for number, places in launches.places.items():
                if number in names:
                    self._places.setdefault(names[number], []).extend(places)
            for i, j in launches.tied:
                pair = names.get(i), None if j is None else names.get(j)
                if pair[0] != pair[1]:
                    self._tied.add(pair)
            for start, arguments in launches.starts(self.stream):
                yield _Call(call.step, start, arguments)

    def follow(self, late: Mapping[str, Tensor]) -> bool:
        """Start where late tensors are now; False if that needs other kernels."""
        for name, at in self._now.items():
            now = late[name].data_ptr()
            if now != at:
                if (now - at) % ALIGNED:
                    return False
                self._now[name] = now
                for arguments, place in self._places[name]:
                    arguments[place] += now - at
        pairs = self._tied
        return all(self._moved(one, late) == self._moved(other, late) for one, other in pairs)

    def _moved(self, name: str | None, late: Mapping[str, Tensor]) -> int:
        return 0 if name is None else late[name].data_ptr() - self._first[name]


class Replay:
    """A program bound to a store, operators and transports, on one stream.

    Attributes:
        sent: bytes that this rank sends to others, by level and flight.
    """

    def __init__(
        self,
        program: Program,
        store: Store,
        ops: Ops,
        transports: Mapping[Level, Transport],
        lockstep: Lockstep,
        own: int,
        *,
        compares: bool = True,
    ) -> None:
        """Bind every step.

        Args:
            own: what stands for :data:`tagc.ops.program.OWN`.
            compares: whether ranks compare headers before the first collective. False if the caller
                has compared more than those say.
        """
        self.program, self._store, self._lockstep = program, store, lockstep
        self._transports = [transports[level] for level in program.levels]
        self._by_level = transports
        self._own = own
        self._late: list[_Late] = []
        self._scratch: list[tuple[Place, _Late]] = []
        self._records: _Records | None = None
        store.declare(*program.places)
        self._shapes = {p.name: p.shape for p in program.places if p.kind == "late"}
        sends = program.sends
        self.sent = {(s.level, s.flight): s.bytes_of(transports[s.level].rank) for s in sends}
        on_others = any(t.by_messages(store.device) for t in self._transports)
        self._compares = compares and on_others
        ranges: list[tuple[str, list[_Call]]] = []
        steps, confirmed = iter(program.steps), not self._compares
        for name, length in program.ranges:
            calls: list[_Call] = []
            for _ in range(length):
                step = next(steps)
                if isinstance(step, Send) and not confirmed:
                    calls.append(_Call(None, lockstep.confirm, []))
                    confirmed = True
                # Training cannot write to views that an evaluation made in inference mode.
                with torch.inference_mode(False):
                    calls.append(self._bound(step, ops))
            ranges.append((name, calls))
        self._calls = _Calls(ranges, self._late)
        every = (call.launches for _, calls in ranges for call in calls)
        self._recording = [launches for launches in every if launches is not None]
        self._take_scratch()

    def run(self, late: Mapping[str, Tensor]) -> None:
        """Run all steps of a program whose collective is counted here.

        Args:
            late: the tensors that come late, by name, contiguous, of any shape.

        Raises:
            RuntimeError: if a collective fails, or if ranks are at different collectives.
        """
        if self._compares:
            self._lockstep.announce(self._transports, self.program.words)
        for _ in self.running(late):
            pass

    def running(self, late: Mapping[str, Tensor]) -> Iterator[None]:
        """Run all steps; pauses where other units may take turns. The caller has announced the
        collective.

        Raises:
            RuntimeError: see :meth:`run`.
        """
        if self._made_for != self._store.workspace.generation:
            self._take_scratch()
        capturing = self._store.capturing
        records = bool(self._recording) and self._records_anew(late, capturing=capturing)
        calls = self._calls if self._records is None else self._records.calls
        whole: dict[str, Tensor] = {}
        for arguments, i, name, index, adapted, _ in calls.late:
            if name not in whole:
                whole[name] = late[name].view(self._shapes[name])
            view = whole[name][index] if index else whole[name]
            arguments[i] = view if adapted is None else adapted(view)
        label = self._lockstep.label if profiling() else None
        call: _Call | None = None
        try:
            for name, made in calls.unnamed if label is None else calls.ranges:
                with _NOTHING if label is None else profiled(name, label):
                    for call in made:
                        if call.turn:
                            yield
                        call.function(*call.arguments)
            if capturing:
                for flight in list(self._store.flights):  # none can leave a graph
                    self._store.wait(flight)
        except RuntimeError as error:
            self._store.drop()
            self._explain(call and call.step, error)
            raise
        finally:
            for held in calls.late:  # buffers of FSDP's, which it frees
                held.arguments[held.place] = None
        if records and all(launches.ready for launches in self._recording):
            self._records = _Records(calls, self._store.stream, late)

    def _records_anew(self, late: Mapping[str, Tensor], *, capturing: bool) -> bool:
        """Whether this run records launches; if not, it starts those that were recorded, or none
        may be kept."""
        device, records = self._store.device, self._records
        elsewhere = device.index is not None and device.index != torch.cuda.current_device()
        if capturing or elsewhere:
            self._records = None  # a graph has buffers of its own
            return False
        if records is None:
            return True
        if records.stream != self._store.stream or not records.follow(late):
            self._records = None
        return self._records is None

    def _bound(self, step: Step, ops: Ops) -> _Call:
        """A step as a call, without tensors that come late."""
        arguments: list[Any] = []
        if isinstance(step, Launch):
            function, launches = step.operator.bound(ops, self._own), None
            device = self._store.device
            if step.operator.launches and compiles_ahead(ops) and device.type != "meta":
                launches = ops.recorded(function)
            for i, place in enumerate(step.places):
                adapted = None if place is None else _adapting(step.operator, i, place)
                recorded = launches is not None
                arguments.append(self._argument(arguments, i, place, adapted, recorded=recorded))
            if launches is None:
                return _Call(step, function, arguments)
            late = enumerate(step.places)
            names = {i: p.name for i, p in late if p is not None and p.kind == "late"}
            return _Call(step, launches, arguments, launches=launches, names=names)
        if isinstance(step, Send):
            transport = self._by_level[step.level]
            begin = _BEGINNING[step.kind](transport, step)
            flights, flight = self._store.flights, step.flight

            def start(*tensors: Tensor) -> None:
                flights[flight] = begin(*tensors)

            scratch = step.scratch if transport.adds_itself(self._store.device) else None
            places = (step.out, step.inp, scratch or step.inp)
            shapes = _shapes_of(step, transport.size)
            for i, place in enumerate(places[: _TENSORS.get(step.kind, 2)]):
                adapted = partial(_viewed, shapes[i]) if i in shapes else None
                arguments.append(self._argument(arguments, i, place, adapted))
            return _Call(step, start, arguments)
        return _Call(step, self._store.wait, [step.flight], step.turn)

    def _argument(
        self,
        arguments: list[Any],
        i: int,
        place: Place | None,
        adapted: Callable[[Tensor], Tensor] | None = None,
        *,
        recorded: bool = False,
    ) -> Tensor | None:
        if place is None:
            return None
        index = place.index(self._own)
        later = _Late(arguments, i, place.name, index, adapted, recorded)
        if place.kind == "late":
            self._late.append(later)
            return None
        if place.kind == "scratch":
            self._scratch.append((place, later))
            return None
        view = self._store.take(place)[index]
        return view if adapted is None else adapted(view)

    def _take_scratch(self) -> None:
        """Bind to scratch buffers, also if they have moved since."""
        take = self._store.take
        for place, _ in self._scratch:  # so that no buffer grows while others are bound
            take(place)
        # Training cannot write to views that an evaluation made in inference mode.
        with torch.inference_mode(False):
            for place, (arguments, i, _, index, adapted, _) in self._scratch:
                view = take(place)[index]
                arguments[i] = view if adapted is None else adapted(view)
        self._records = None
        self._made_for = self._store.workspace.generation

    def _explain(self, step: Step | None, error: RuntimeError) -> None:
        """Add what failed to an error of a launch; raise one that says it for a collective."""
        if step is None:  # a comparison with other ranks, which names itself
            return
        if isinstance(step, Launch):
            error.add_note(f"tagc: in {self.program.what}: {step}")
            return
        level = step.level if isinstance(step, Send) else self._level_of(step.flight)
        with failing_in(self.program.what, self._by_level[level].group):
            raise error

    def _level_of(self, flight: str) -> Level:
        """The level of a flight; of one that an earlier run started, that of messages."""
        found: list[Level] = [s.level for s in self.program.sends if s.flight == flight]
        return found[0] if found else self.program.levels[-1]


def profiling() -> bool:
    """Whether a profiler runs. Without one there are no ranges, because even then torch's own takes
    as long as starting a kernel. (An ``ExecutionTraceObserver`` alone is no profiler.)"""
    # The second knows this thread only, and the first not every profiler.
    return torch.autograd.profiler._is_profiler_enabled or torch.autograd._profiler_enabled()


def profiled(what: str, name: str) -> AbstractContextManager[object]:
    """The range ``TAGC::what (name)`` of a profiler."""
    return record_function(f"TAGC::{what} ({name})")


def _adapting(operator: Operator, i: int, place: Place) -> Callable[[Tensor], Tensor] | None:
    """How the operator takes its tensor ``i``; None if as it is."""
    with torch.inference_mode(False):
        view = torch.empty(place.view_shape, dtype=place.dtype, device="meta")
    return None if operator.adapted(i, view) is view else partial(operator.adapted, i)


def _shapes_of(step: Send, ranks: int) -> dict[int, tuple[int, ...]]:
    """The shapes that a transport takes, by number of the tensor: ``out``, ``inp`` and scratch.
    Others are as their places."""
    numel = step.inp.numel
    if step.kind == "all-gather":
        return {0: (ranks, numel)}
    if step.kind == "all-gather each":
        rows, columns = step.inp.view_shape
        return {0: (rows, ranks, columns)}
    if step.kind == "all-to-all":
        return dict.fromkeys((0, 1), (ranks, numel // ranks))
    if step.kind == "reduce-scatter":
        rows, columns = step.out.view_shape
        return dict.fromkeys((1, 2), (rows, ranks, columns))
    return {}


def _viewed(shape: tuple[int, ...], tensor: Tensor) -> Tensor:
    return tensor.view(shape)


# How many tensors a collective takes, if not `out` and `inp` alone. The third is a buffer for what
# arrives, or `inp` if the backend adds up.
_TENSORS: dict[Collective, int] = {"all-reduce": 1, "reduce-scatter": 3}
_BEGINNING: dict[Collective, Callable[[Transport, Send], Callable[..., CollectiveWork]]] = {
    "all-gather": lambda transport, _: transport.gather,
    "all-gather each": lambda transport, _: transport.gather_each,
    "all-to-all": lambda transport, step: partial(transport.all_to_all, columns=step.columns),
    "reduce-scatter": lambda transport, _: transport.sum_each,
    "all-reduce": lambda transport, step: partial(transport.all_reduce, in_flight=step.in_flight),
}
