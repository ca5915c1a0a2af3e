"""Units do not wait for each other: what a unit waits for, it has started itself.

On a GPU the three parts of a reduction run on FSDP's reduce-scatter stream, beside the backward,
those of a gather on its all-gather stream, and a wait is the stream's, not the host's; here the
order of the parts and the waits are noted, on gloo.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import tagc
from support import fsdp1_net
from support.distributed import on_ranks, run_ranks
from support.small_net import loss_of, sharded
from support.units import codec_plan, normal, reduce, unit_reducer
from tagc.collect import CollectiveWork, Transport, UnitReducer
from tagc.collect.gatherer import UnitGatherer

QUANTIZED: dict[str, Any] = {"kind": "quantized", "bits": 4, "block": 32}
# Its counts are in flight until the unit's next step.
SKETCH: dict[str, Any] = {"kind": "sketch", "density": 0.3, "symbol": "int8x4"}
INT8 = QUANTIZED | {"bits": 8}
DENSE = {"when": {}, "codec": {"kind": "dense"}}
REDUCES, GATHERS = (
    ("encode", "exchange", "decode"),
    ("encode parameters", "gather parameters", "decode parameters"),
)
INSIDE, SHARES = "add inside the host", "gather parameters"
ON_HOSTS = {(INSIDE, "exchange"), (INSIDE, *REDUCES)}
# Ways that traffic takes: ranks, four of them on two hosts; codecs; what a unit does at once,
# without another in between. (The root compresses nothing, and has only what is inside of hosts.)
WAYS: dict[str, tuple[int, dict[str, Any], set[tuple[str, ...]]]] = {
    "gradients": (2, {"gradients": QUANTIZED}, {REDUCES}),
    "sketches": (2, {"gradients": SKETCH}, {REDUCES}),
    "FSDP1": (2, {"gradients": QUANTIZED}, {REDUCES}),
    "sketches in FSDP1": (2, {"gradients": SKETCH}, {REDUCES}),
    "parameters": (2, {"gradients": QUANTIZED, "parameters": INT8}, {REDUCES, GATHERS}),
    "hosts": (4, {"gradients": QUANTIZED}, ON_HOSTS),
    "sketches of hosts": (4, {"gradients": SKETCH}, ON_HOSTS),
    "inside": (4, {"gradients": QUANTIZED, "inside": "int8"}, ON_HOSTS),
    "delta": (
        4,
        {"gradients": QUANTIZED, "parameters": QUANTIZED | {"kind": "delta"}},
        {*ON_HOSTS, (*GATHERS, SHARES), (SHARES,)},
    ),
    "parameters of hosts": (4, {"gradients": QUANTIZED, "parameters": INT8}, {*ON_HOSTS, GATHERS}),
    "replicas in one shot": (2, {"replicas": QUANTIZED}, {REDUCES}),
    "replicas in two shots": (3, {"replicas": QUANTIZED}, {(*REDUCES, "second shot")}),
}


class Notes:
    """What happens on a rank, in order.

    Attributes:
        parts: (what, unit) of every part of a reduction or a gather that began or ended.
        calls: (unit, its parts) of every reduction or gather that had any, in the order of the
            first part.
        foreign: (waiting, started by) where a unit waited for a collective that another one had
            started, or itself in the other direction.
        waits: all that were waited for.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []
        self.calls: list[tuple[str, list[str]]] = []
        self.foreign: list[tuple[str, str]] = []
        self.waits = 0
        self._current = self._last = "", 0
        self._count = 0
        self._started: dict[int, str] = {}
        # Else a new one could get the name of one that is gone.
        self._kept: list[CollectiveWork] = []

    @contextmanager
    def part(self, what: str, unit: str) -> Iterator[None]:
        if what == "start":  # the first values of a unit's state
            yield
            return
        self.parts.append((what, unit))
        if self._last != self._current:
            self.calls.append((self._current[0], []))
        self._last = self._current
        self.calls[-1][1].append(what)
        yield
        self.parts.append((f"{what} ends", unit))

    def noting(self, original: Any) -> Any:
        """``original``, a reduction or a gather of a unit; one may begin inside of another."""

        def call(unit: Any, *args: Any, **how: Any) -> None:
            outer, self._count = self._current, self._count + 1
            self._current = f"{unit.plan.direction} {unit.plan.info.label}", self._count
            try:
                original(unit, *args, **how)
            finally:
                self._current = outer

        return call

    def started(self, work: CollectiveWork) -> None:
        self._started[id(work)] = self._current[0]
        self._kept.append(work)

    def waited(self, work: CollectiveWork) -> None:
        self.waits += 1
        if self._started[id(work)] != self._current[0]:
            self.foreign.append((self._current[0], self._started[id(work)]))

    def finish(self) -> None:
        """Let go of the collectives, which no process can hand to another."""
        self._kept.clear()


@contextmanager
def noting(mixed_up: bool = False) -> Iterator[Notes]:
    """Inside, what happens is noted; ``mixed_up``: as if all waited for the first collective."""
    notes, last = Notes(), []
    made, wait = CollectiveWork.__init__, CollectiveWork.wait

    def make(work: CollectiveWork, *args: Any, **kwargs: Any) -> None:
        made(work, *args, **kwargs)
        notes.started(work)
        last.append(work)

    def waits(work: CollectiveWork) -> None:
        notes.waited(last[0] if mixed_up else work)
        wait(work)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Such small units pay with no codec.
        warnings.simplefilter("ignore", UserWarning)
        patch.setattr("tagc.collect.replay.profiling", lambda: True)
        patch.setattr("tagc.collect.replay.profiled", notes.part)
        patch.setattr(UnitReducer, "reduce", notes.noting(UnitReducer.reduce))
        patch.setattr(UnitGatherer, "gather", notes.noting(UnitGatherer.gather))
        patch.setattr(CollectiveWork, "__init__", make)
        patch.setattr(CollectiveWork, "wait", waits)
        yield notes
    notes.finish()


def policy(**codecs: Any) -> dict[str, Any]:
    """Codecs of the weights, by direction; other keys as they are."""
    when, made = {"name": ["first*weight", "second*weight"]}, {"schema": 1, "gradients": [DENSE]}
    for key, codec in codecs.items():
        owing = {"feedback": {"kind": "residual"}} if key in ("gradients", "replicas") else {}
        made[key] = [{"when": when, "codec": codec} | owing] if isinstance(codec, dict) else codec
    return made


def noted(rank: int, way: str, mixed_up: bool = False) -> Notes:
    ranks, codecs, _ = WAYS[way]
    with noting(mixed_up) as notes:
        if "FSDP1" in way:
            model = fsdp1_net.sharded()
        elif "replicas" in codecs:
            # FSDP2's own hybrid sharding.
            mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("copies", "shards"))
            model = sharded(mesh=mesh)
        else:
            model = sharded()
        tagc.wrap(model, policy(**codecs), hosts=2 if ranks == 4 else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(3):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return notes


@pytest.mark.some(4)
@pytest.mark.parametrize("way", WAYS)
def test_a_unit_waits_for_its_own_collectives_only(way: str) -> None:
    ranks, _, at_once = WAYS[way]
    for notes in run_ranks(noted, ranks, way):
        assert notes.waits
        assert notes.foreign == []
        assert {tuple(parts) for _, parts in notes.calls} == at_once
        # Nothing begins before what began earlier has ended: one after the other on a stream.
        begins, ends = notes.parts[::2], notes.parts[1::2]
        assert ends == [(f"{what} ends", unit) for what, unit in begins]
        of_a_step = [unit for unit, _ in notes.calls[: len(notes.calls) // 3]]
        if at_once == {REDUCES} and "gradients" in WAYS[way][1]:
            assert of_a_step == [f"gradients {unit}" for unit in ("second", "first.2", "first")]
        if way == "parameters":
            # FSDP asks for the next block's parameters first, and gets them on another stream: a
            # block is gathered before the reduction that it need not wait for.
            assert of_a_step == [
                # forward
                "parameters first", "parameters first.2", "parameters second",
                # backward
                "parameters second", "parameters first", "gradients second",
                "parameters first.2", "gradients first.2", "gradients first",
            ]  # fmt: skip


def test_a_wait_for_another_unit_would_be_seen() -> None:
    for notes in run_ranks(noted, 2, "parameters", True):
        assert notes.foreign


@on_ranks(2)
def test_an_unshard_in_advance_has_the_same_bits(rank: int, world_size: int) -> None:
    """Before FSDP's first forward, when it has no streams, and later."""
    model = sharded()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tagc.wrap(model, policy(parameters=INT8))
    for began in (False, True):
        if began:
            loss_of(model, rank, 0).backward()
        model.second.unshard()
        expected = [p.clone() for p in model.second.parameters()]
        model.second.reshard()
        handle = model.second.unshard(async_op=True)
        handle.wait()
        for found, whole in zip(model.second.parameters(), expected, strict=True):
            assert torch.equal(found, whole)
        model.second.reshard()


def late(original: Any) -> Any:
    """The collective, which here begins only when it is waited for."""

    def start(*args: Any, **how: Any) -> CollectiveWork:
        return CollectiveWork([SimpleNamespace(wait=lambda: original(*args, **how).wait())], 0)

    return start


@on_ranks(2)
@pytest.mark.parametrize("codec", [QUANTIZED, SKETCH], ids=["quantized", "sketch"])
def test_what_arrives_late_is_waited_for(rank: int, world_size: int, codec: dict[str, Any]) -> None:
    """Messages and cells before they are decoded, counts before they steer the thresholds."""
    plan = codec_plan(world_size, codec)
    in_time, at_last = unit_reducer(plan), unit_reducer(plan)
    starts = {name: late(getattr(Transport, name)) for name in ("all_to_all", "all_reduce")}
    for step in range(3):
        grad = normal(world_size, plan.columns, step)[rank]
        expected = reduce(in_time, grad)
        with patch.multiple(Transport, **starts):
            assert torch.equal(reduce(at_last, grad), expected)
