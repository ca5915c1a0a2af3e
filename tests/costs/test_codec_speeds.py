"""Speeds of codecs: everything that a plan can hold is timed, and alike in every turn."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tagc
from tagc.costs import Link, Speed, auto, measure_speeds, speed, speed_key
from tagc.costs.shapes import synthetic
from tagc.ops import get_ops

WRAPPED = [name for name in tagc.policies() if tagc.Policy.load(name).sites is None]


@pytest.mark.parametrize("parameters", [False, True])
def test_every_codec_of_the_shipped_policies_has_a_speed(parameters: bool) -> None:
    """Whatever a plan holds is among what is measured for it."""
    timed: dict[str, Speed] = {}
    with patch.dict(speed._ELEMENTS, {"cpu": 1 << 12}):
        for name in WRAPPED:
            codecs = auto.codecs_of(tagc.Policy.load(name), torch.float32, 2, parameters=parameters)
            new = [c for c in codecs if speed_key(c) not in timed]
            ops, device = get_ops("cpu", "reference"), torch.device("cpu")
            timed |= measure_speeds(new, ops, device, torch.float32, repeats=1)
    assert all(found.encode > 0 and found.decode > 0 for found in timed.values())
    link, shapes = Link(bandwidth=1e3), {p.name: p.shape for p in synthetic(1_000_000).params}
    for name in WRAPPED:
        plan = tagc.explain(shapes, name, world_size=2, link=link)
        for unit in plan.all_units:
            if unit.compressed and (unit.direction == "parameters") == parameters:
                assert {speed_key(s.codec) for s in unit.segments} <= set(timed)


def test_every_turn_starts_from_an_empty_residual() -> None:
    """One that grew from turn to turn would select more than fits, and time the trimming of it."""
    real, seen = get_ops("cpu", "reference"), []

    def encoding(name: str) -> Any:
        def call(grad: Any, residual: Any, *rest: Any, **sizes: Any) -> None:
            seen.append((name, float(residual.abs().max())))
            getattr(real, name)(grad, residual, *rest, **sizes)

        return call

    decoders = {
        n: getattr(real, n)
        for n in ("decode", "dequantize", "put_dense", "select", "steer", "sum_dense", "undo_lag")
    }
    encoders = {name: encoding(name) for name in ("encode", "quantize")}
    ops: Any = SimpleNamespace(**decoders, **encoders)
    with patch.dict(speed._ELEMENTS, {"cpu": 1 << 12}):
        for policy in ("attn-only", "loco-4bit"):
            codecs = auto.codecs_of(tagc.Policy.load(policy), torch.float32, 2, parameters=False)
            measure_speeds(codecs, ops, torch.device("cpu"), torch.float32, repeats=3)
    assert {name for name, _ in seen} == {"encode", "quantize"}
    assert all(owed == 0 for _, owed in seen)


def test_a_gpu_is_timed_by_events_behind_a_wait() -> None:
    """The host queues all repeats first, so that its launches do not count."""
    notes: list[str] = []
    milliseconds = iter([3.0, 1.0, 2.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            notes.append("event")

        def elapsed_time(self, end: Event) -> float:
            assert notes[-1] == "synchronize"
            return next(milliseconds)

    with (
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
        patch.object(torch.cuda, "synchronize", lambda: notes.append("synchronize")),
        patch.object(torch.cuda, "_sleep", lambda cycles: notes.append("wait")),
    ):
        seconds = speed._seconds(
            lambda: notes.append("run"),
            lambda: notes.append("before"),
            torch.device("cuda"),
            repeats=3,
        )
    assert seconds == pytest.approx(1e-3)
    repeat = ["before", "event", "run", "event"]
    assert notes == ["before", "run", "synchronize", "wait", *repeat * 3, "synchronize"]
