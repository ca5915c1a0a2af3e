"""Flags of a GPU are seen in the same step on all ranks, and then stay; so do buffers of graphs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from support.distributed import fails
from tagc.codecs import workspace
from tagc.codecs.workspace import LAG, Workspace
from tagc.collect.alarm import Alarm
from tagc.collect.replay import Store
from tagc.ops.program import Place


@contextmanager
def gpu() -> Iterator[Any]:
    """A store whose device says that it is a GPU, and has memory on the host."""

    class Event:
        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None: ...

    stream = SimpleNamespace(
        cuda_stream=7, synchronize=lambda: None, wait_stream=lambda other: None
    )

    def zeros(size: Any, *, dtype: torch.dtype, **_: Any) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    fake = SimpleNamespace(
        zeros=zeros,
        zeros_like=lambda page, **_: torch.zeros(page.shape, dtype=page.dtype),
        cuda=SimpleNamespace(Event=Event, current_stream=lambda device: stream),
        **{name: getattr(torch, name) for name in ("bool", "inference_mode")},
    )
    device: Any = SimpleNamespace(type="cuda")
    with patch.object(workspace, "torch", fake), patch.object(Store, "capturing", False):
        yield Store(device, Workspace(device))


def place(name: str) -> Place:
    return Place(name, (1,), torch.bool, "flag")


@pytest.mark.parametrize(("wrong_at", "others"), [(-1, 3), (0, 3), (5, 0), (1, 1500)])
def test_it_goes_off_a_few_rounds_later_and_then_always(wrong_at: int, others: int) -> None:
    with gpu() as store:
        neighbours = [(f, Alarm("another", store, f)) for f in map(place, map(str, range(others)))]
        alarm = Alarm("wrong", store, place("tested"))
        steps = []
        for step in range(12):
            if "wrong" in fails(alarm.check)[1]:
                steps.append(step)
            for its_flag, neighbour in neighbours:
                neighbour.check()
                store.take(its_flag)
                neighbour.note()
            flag = store.take(place("tested"))
            if step == wrong_at:
                flag.fill_(True)
            alarm.note()
        # Who ends a round notes its own flag a little before the round's copy.
        first = wrong_at + LAG + 2 - (others == 0 and wrong_at > 0)
        assert steps == list(range(first, 12) if wrong_at >= 0 else ())


def test_a_replayed_graph_makes_it_go_off() -> None:
    """Its launches set the flag, but nothing notes that they may have."""
    wrong_at = 1
    with gpu() as store:
        alarm = Alarm("wrong", store, place("tested"))
        flag = store.take(place("tested"))
        with patch.object(Store, "capturing", True):
            alarm.note()
        steps = []
        for step in range(12):
            store.workspace.before_graph()
            if "wrong" in fails(alarm.check)[1]:
                steps.append(step)
            if step == wrong_at:
                flag.fill_(True)
        assert steps == list(range(wrong_at + LAG + 1, 12))


def test_buffers_that_a_graph_may_hold_stay() -> None:
    for captured in (False, True):
        space = Workspace(torch.device("cpu"))
        if captured:
            space.before_graph()
        held = [weakref.ref(space.take("a", (size,), torch.float32)._base) for size in (3, 9)]
        space.clear()
        assert [buffer() is not None for buffer in held] == [captured, captured]


def test_training_writes_to_what_an_evaluation_took() -> None:
    space = Workspace(torch.device("cpu"))
    with torch.inference_mode():
        space.take("name", (4,), torch.float32).zero_()
    view = space.take("name", (4,), torch.float32)
    view.copy_(torch.ones(4, requires_grad=True))
    assert view.sum() == 4


def test_a_cpu_raises_at_once_and_once() -> None:
    device = torch.device("cpu")
    store = Store(device, Workspace(device))
    alarm = Alarm("wrong", store, place("tested"))
    store.take(place("tested")).fill_(True)
    with pytest.raises(RuntimeError, match="wrong"):
        alarm.note()
    alarm.note()
