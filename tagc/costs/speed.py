"""Seconds that codecs take: measured on this device, assumed from its memory, or none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from tagc.codecs import CodecPlan
from tagc.codecs.workspace import Workspace
from tagc.collect.lockstep import Lockstep
from tagc.collect.replay import Replay, Store
from tagc.ops import Ops
from tagc.ops.program import Launch, Program, Send, Step
from tagc.plan import MessagePlan, Segment, UnitInfo, UnitParam, UnitPlan, sends_in_step
from tagc.plan.gathers import Gathers
from tagc.plan.reductions import Reductions, Variant

_RANKS = 4
# Elements of all rows. A GPU needs more, so that the ends of kernels do not count.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
_REPEATS = 5
# Cycles for which a GPU waits while the host queues all repeats: some 5 ms.
_HELD_BACK = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds per element that a codec takes on one device."""

    encode: float
    decode: float  # of a sketch, per element of the sum: it is summed before it is decoded


@dataclass(frozen=True)
class Coding:
    """How often a rank encodes and decodes messages in a step, from gradients or parameters of
    ``dtype``."""

    messages: MessagePlan
    dtype: torch.dtype
    encodes: int
    decodes: int


CodecTime = Callable[[Coding, Segment], float]
"""Seconds that a rank spends encoding and decoding one segment of messages in a step."""


def codec_seconds(unit: UnitPlan, time: CodecTime, micro_batches: int = 1) -> float:
    """Seconds that a rank encodes and decodes a unit in a step of ``micro_batches`` backwards."""
    starts = Counter[str]()
    for send, times in sends_in_step(unit, micro_batches):
        starts[send.flight] += times
    total = 0.0
    for flight, messages in unit.flights.items():
        encodes = decodes = starts[flight]
        if unit.direction == "parameters" and not unit.keeps_copy:
            # A backward may decode what the forward received.
            decodes = micro_batches * unit.info.per_step
        if encodes:
            coding = Coding(messages, unit.info.dtype, encodes, decodes)
            total += sum(time(coding, segment) for segment in messages.segments if segment.columns)
    return total


def speed_key(codec: CodecPlan) -> str:
    """The properties of a codec that decide its speed, except sizes."""
    key, stored = codec.name.removesuffix(" kept"), codec.feedback
    key += f" at {codec.density:g}" if codec.density < 1 else ""
    return key + (f" with {str(stored.dtype).removeprefix('torch.')} feedback" if stored else "")


def measured_time(speeds: Mapping[str, Speed]) -> CodecTime:
    """Codec time from measured speeds, by :func:`speed_key`. It raises ValueError for a codec
    without a speed."""

    def seconds(coding: Coding, segment: Segment) -> float:
        key = speed_key(segment.codec)
        if key not in speeds:
            raise ValueError(f"no speed was measured for {key!r}, only for {', '.join(speeds)}")
        speed, messages = speeds[key], coding.messages
        encoded = messages.made * coding.encodes
        # Cells are decoded once, as a sum.
        decoded = (1 if segment.codec.cells else messages.read) * coding.decodes
        return segment.columns * (speed.encode * encoded + speed.decode * decoded)

    return seconds


def memory_time(bandwidth: float) -> CodecTime:
    """A lower bound of codec time on a device with a memory bandwidth of ``bandwidth`` bytes/s. It
    counts only the bytes that encoding and decoding must read and write, each once. Real kernels
    take longer."""

    def seconds(coding: Coding, segment: Segment) -> float:
        codec, messages = segment.codec, coding.messages
        row = segment.columns * coding.dtype.itemsize
        stored = codec.feedback.row_bytes(segment.columns) if codec.feedback else 0
        encode = messages.made * (row + 2 * stored + 4 * (codec.words + codec.cells))
        if codec.of_changes:  # it also reads its own row of the copy
            encode += row
        decode = 4 * (messages.read * codec.words + codec.cells) + messages.rows * row
        return (encode * coding.encodes + decode * coding.decodes) / bandwidth

    return seconds


def no_time(coding: Coding, segment: Segment) -> float:
    """Codecs count as free."""
    return 0.0


def timed_when_asked(speeds: dict[str, Speed], ops: Ops, device: torch.device) -> CodecTime:
    """Codec time from speeds that are measured on a device, and put into ``speeds``, when the time
    of a codec is first asked for."""
    known = measured_time(speeds)

    def seconds(coding: Coding, segment: Segment) -> float:
        key = speed_key(segment.codec)
        if key not in speeds:
            speeds[key] = measure_speed(segment.codec, coding.dtype, ops, device)
        return known(coding, segment)

    return seconds


def measure_speed(codec: CodecPlan, dtype: torch.dtype, ops: Ops, device: torch.device) -> Speed:
    """The speed of a codec on gradients (or parameters) of a dtype."""
    numel = _ELEMENTS.get(device.type, _ELEMENTS["cuda"])
    sample = _Sample(codec, numel // _RANKS, ops, device, dtype)
    measure = _kernels if device.type == "cuda" else fastest
    encode = measure(sample.encode, device, _REPEATS, sample.restore)
    decode = measure(sample.decode, device, _REPEATS, sample.receive)
    decoded = numel // _RANKS if codec.cells else numel
    return Speed(encode=encode / numel, decode=decode / decoded)


class _Sample:
    """A unit of one segment, on one device that stands for all ranks: what it sends comes back."""

    def __init__(
        self, codec: CodecPlan, numel: int, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        param = UnitParam(name="sample", shape=(_RANKS * numel,), columns=numel)
        info = UnitInfo(name="sample", params=(param,), world_size=_RANKS, dtype=dtype)
        resized = codec.resized(numel)
        segment = Segment(start=0, stop=numel, params=(param,), rule=None, codec=resized)
        gathered = codec.of_changes or codec.exact  # only parameters are
        direction = "parameters" if gathered else "gradients"
        unit = UnitPlan(direction=direction, info=info, segments=(segment,))
        self._store, self._ops = Store(device, Workspace(device)), ops
        self._lockstep = Lockstep(direction, info.label, device)
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (1 if gathered else _RANKS, numel)
        wide = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        rows = _RANKS if gathered else 1
        out = torch.empty(rows, numel, dtype=dtype, device=device)
        self._late = {"inp": wide.to(dtype), "out": out}
        self._copy: Tensor | None = None
        encode: list[Step] = []
        if gathered:
            gathers = Gathers(unit)
            program = gathers.changes if codec.of_changes else gathers.message
            if gathers.sizes is not None:
                encode += gathers.sizes.steps
            if gathers.sizes is not None and codec.of_changes:
                self._store.declare(gathers.copy)
                # Half of the parameters have moved by a few units in the last place.
                moved = torch.randint(0, 8, shape, generator=generator, device=device)
                near = self._late["inp"].view(torch.int16) ^ (moved - 4).clamp_(0).short()
                self._copy = near.view(dtype).expand(rows, -1)
        else:
            programs = Reductions(unit)
            for first in (programs.start(0), programs.lower(Variant(begun=False))):
                for step in first.steps:
                    if isinstance(step, Launch):
                        self._run(self._bound([step]))
                    elif isinstance(step, Send):
                        self._return(step)
            program = programs.lower(Variant())
        decode: list[Step] = []
        steps = iter(program.steps)
        for name, length in program.ranges:
            launches = [step for step in islice(steps, length) if isinstance(step, Launch)]
            if name.startswith("encode"):
                encode += launches
            elif name.startswith("decode"):
                decode += launches
        self.encode = partial(self._run, self._bound(encode))
        self.decode = partial(self._run, self._bound(decode))
        self._sends = program.sends
        self.restore()
        self.encode()

    def receive(self) -> None:
        """Decoding may overwrite what was received, and what it adds changes to."""
        self.restore()
        for send in self._sends:
            self._return(send)

    def restore(self) -> None:
        """Owe nothing: else the residual would grow with every call, and select more than fits."""
        for name, tensor in self._store:
            if name.startswith("residual."):
                tensor.zero_()
            if name == "copy" and self._copy is not None:
                tensor.copy_(self._copy)

    def _bound(self, launches: Sequence[Step]) -> Replay:
        program = Program.of("a sample", [("sample", launches)])
        return Replay(program, self._store, self._ops, {}, self._lockstep, 0)

    def _run(self, replay: Replay) -> None:
        for _ in replay.running(self._late):
            pass

    def _return(self, send: Send) -> None:
        out, inp = (self._store.take(place) for place in (send.out, send.inp))
        if out.data_ptr() == inp.data_ptr():
            return
        if len(out) < len(inp):
            torch.sum(inp, 0, keepdim=True, dtype=out.dtype, out=out)
        else:
            out.copy_(inp.expand_as(out))


def fastest(
    run: Callable[[], object],
    device: torch.device,
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of the fastest of several calls, as other load on the machine only adds time; without
    those of ``before``, and without the first call, which compiles or sets up connections."""
    taken = []
    for _ in range(repeats + 1):
        before()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def _kernels(
    run: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object]
) -> float:
    """Seconds of the kernels alone. In a step the host launches them ahead of the device; here they
    queue up behind a wait, so that events between them do not wait for the host."""
    before()
    run()  # the first call compiles
    with torch.cuda.device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize()
        torch.cuda._sleep(_HELD_BACK)
        for start, end in events:
            before()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
    return min(1e-3 * start.elapsed_time(end) for start, end in events)
