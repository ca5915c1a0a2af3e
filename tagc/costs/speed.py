"""Measures codecs on this device, in seconds per element."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import torch

from tagc.codecs import CodecPlan
from tagc.codecs.workspace import Workspace
from tagc.collect.replay import Store
from tagc.costs.codec_time import Speed, speed_key
from tagc.ops import Ops
from tagc.ops.program import Launch, Place, Send, Step
from tagc.plan import Segment, UnitInfo, UnitParam, UnitPlan
from tagc.plan.gathers import Gathers
from tagc.plan.reductions import Reductions, Variant

_RANKS = 4
# Elements of all rows. A GPU needs more, so that the ends of kernels do not count.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
_REPEATS = 5
# Cycles for which a GPU waits while the host queues all repeats: some 5 ms.
_HELD_BACK = 10_000_000


def measure_speeds(
    codecs: Iterable[CodecPlan],
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    *,
    repeats: int = _REPEATS,
) -> dict[str, Speed]:
    """Measure every codec on gradients (or parameters) of ``dtype``.

    Returns:
        Speeds by :func:`speed_key`.
    """
    speeds: dict[str, Speed] = {}
    for codec in codecs:
        key = speed_key(codec)
        if key not in speeds:
            speeds[key] = _measure(codec, ops, device, dtype, repeats)
    return speeds


def _measure(
    codec: CodecPlan, ops: Ops, device: torch.device, dtype: torch.dtype, repeats: int
) -> Speed:
    numel = _ELEMENTS.get(device.type, _ELEMENTS["cuda"])
    sample = _Sample(codec, numel // _RANKS, ops, device, dtype)
    decoded = numel // _RANKS if codec.cells else numel
    return Speed(
        encode=_seconds(sample.encode, sample.restore, device, repeats) / numel,
        decode=_seconds(sample.decode, sample.receive, device, repeats) / decoded,
    )


class _Sample:
    """A unit of one segment, on one device that stands for all ranks: what it sends comes back."""

    def __init__(
        self, codec: CodecPlan, numel: int, ops: Ops, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make a segment of ``numel`` columns."""
        param = UnitParam(name="sample", shape=(_RANKS * numel,), columns=numel)
        info = UnitInfo(name="sample", params=(param,), world_size=_RANKS, dtype=dtype)
        segment = Segment(
            start=0,
            stop=numel,
            params=(param,),
            role="sample",
            rule=None,
            codec=codec.resized(numel),
        )
        direction = "parameters" if codec.of_changes else "gradients"
        unit = UnitPlan(direction=direction, info=info, segments=(segment,))
        self._store, self._ops = Store(device, Workspace(device)), ops
        generator = torch.Generator(device=device).manual_seed(0)
        shape = (1 if codec.of_changes else _RANKS, numel)
        wide = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        rows = _RANKS if codec.of_changes else 1
        out = torch.empty(rows, numel, dtype=dtype, device=device)
        self._late = {"inp": wide.to(dtype), "out": out}
        if codec.of_changes:
            program = Gathers(unit).changes
        else:
            programs = Reductions(unit)
            for first in (programs.start(0), programs.lower(Variant(begun=False))):
                for step in self._bound(first.steps):
                    step()
            program = programs.lower(Variant())
        self._encode: list[Callable[[], object]] = []
        self._decode: list[Callable[[], object]] = []
        steps = iter(program.steps)
        for name, length in program.ranges:
            bound = self._bound(s for s in islice(steps, length) if isinstance(s, Launch))
            if name.startswith("encode"):
                self._encode += bound
            elif name.startswith("decode"):
                self._decode += bound
        self._receive = self._bound(program.sends)
        self.restore()
        self.encode()

    def encode(self) -> None:
        for launch in self._encode:
            launch()

    def decode(self) -> None:
        for launch in self._decode:
            launch()

    def receive(self) -> None:
        """Receive what was sent; decoding may overwrite it."""
        for send in self._receive:
            send()

    def restore(self) -> None:
        """Owe nothing: else the residual would grow with every call, and select more than fits."""
        for name, tensor in self._store:
            if name.startswith("residual."):
                tensor.zero_()

    def _bound(self, steps: Iterable[Step]) -> list[Callable[[], object]]:
        found: list[Callable[[], object]] = []
        for step in steps:
            if isinstance(step, Launch):
                operator = step.operator
                tensors = [
                    None if place is None else operator.adapted(i, self._tensor(place))
                    for i, place in enumerate(step.places)
                ]
                found.append(partial(operator.bound(self._ops, 0), *tensors))
            elif isinstance(step, Send):
                found.append(partial(_returned, self._tensor(step.out), self._tensor(step.inp)))
        return found

    def _tensor(self, place: Place) -> torch.Tensor:
        if place.kind == "late":
            return self._late[place.name][place.index(0)]
        self._store.declare(place)
        return self._store.take(place)[place.index(0)]


def _returned(out: torch.Tensor, inp: torch.Tensor) -> None:
    """What a rank receives if all send the same."""
    if out.data_ptr() == inp.data_ptr():
        return
    if len(out) < len(inp):
        torch.sum(inp, 0, keepdim=True, dtype=out.dtype, out=out)
    else:
        out.copy_(inp.expand_as(out))


def _seconds(
    run: Callable[[], object], before: Callable[[], object], device: torch.device, repeats: int
) -> float:
    before()
    run()  # the first call compiles, or warms up
    timed = _on_cpu(run, before, repeats)
    if device.type == "cuda":
        with torch.cuda.device(device):
            timed = _on_gpu(run, before, repeats)
    return min(timed)  # other load on the machine only adds time


def _on_cpu(
    run: Callable[[], object], before: Callable[[], object], repeats: int
) -> Iterator[float]:
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        run()
        yield time.perf_counter() - start


def _on_gpu(run: Callable[[], object], before: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of the kernels alone. In a step the host launches them ahead of the device; here they
    queue up behind a wait, so that events between them do not wait for the host."""
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in ("start", "end")] for _ in range(repeats)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(_HELD_BACK)
    for start, end in events:
        before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in events]
