"""Units do not wait for each other: what a unit waits for, it has started itself. And what arrives
late is waited for.

On a GPU a wait is the stream's, not the host's; here waits are noted, on gloo.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tagc
from support import fsdp1_net
from support.distributed import on_ranks
from support.small_net import loss_of, sharded
from support.units import codec_plan, normal, reduce, unit_reducer
from tagc.collect import CollectiveWork, Transport, UnitReducer
from tagc.collect.gatherer import UnitGatherer

QUANTIZED: dict[str, Any] = {"kind": "quantized", "bits": 4, "block": 32}
# Its counts are in flight until the unit's next step.
SKETCH: dict[str, Any] = {"kind": "sketch", "density": 0.3, "symbol": "int8x4"}


@contextmanager
def noted_waits() -> Iterator[list[tuple[str, str]]]:
    """Of every wait: the unit that waits, with its direction, and the one that started it."""
    waits: list[tuple[str, str]] = []
    calls = ["nothing"]  # in progress: a reduction may begin inside a gather
    started: dict[int, str] = {}
    kept: list[CollectiveWork] = []  # or a new one could get the id of one that is gone
    make, wait = CollectiveWork.__init__, CollectiveWork.wait

    def within(original: Callable[..., None]) -> Callable[..., None]:
        def call(unit: Any, *args: Any, **options: Any) -> None:
            calls.append(f"{unit.plan.direction} {unit.plan.info.label}")
            original(unit, *args, **options)
            calls.pop()

        return call

    def noted_start(work: CollectiveWork, *args: Any, **options: Any) -> None:
        make(work, *args, **options)
        started[id(work)] = calls[-1]
        kept.append(work)

    def noted_wait(work: CollectiveWork) -> None:
        waits.append((calls[-1], started[id(work)]))
        wait(work)

    with (
        patch.object(UnitReducer, "reduce", within(UnitReducer.reduce)),
        patch.object(UnitGatherer, "gather", within(UnitGatherer.gather)),
        patch.multiple(CollectiveWork, __init__=noted_start, wait=noted_wait),
    ):
        yield waits


def policy(gradients: dict[str, Any], parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    when = {"name": ["first*weight", "second*weight"]}
    rules: dict[str, Any] = {"gradients": [{"when": when, "codec": gradients}]}
    if parameters is not None:
        rules["parameters"] = [{"when": when, "codec": parameters}]
    return {"schema": 1} | rules


def wrapped(model: Any, rules: dict[str, Any], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such small units pay with no codec
        return tagc.wrap(model, rules, **options)


CHANGES = policy(QUANTIZED, QUANTIZED | {"kind": "delta"})


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "api", "rules", "hosts"),
    [(2, "FSDP1", policy(SKETCH), None), (4, "FSDP2", CHANGES, 2)],
    ids=["sketches in FSDP1", "changes on hosts"],
)
def test_a_unit_waits_for_its_own_collectives_only(
    rank: int, world_size: int, api: str, rules: dict[str, Any], hosts: int | None
) -> None:
    with noted_waits() as waits:
        model = wrapped(sharded() if api == "FSDP2" else fsdp1_net.sharded(), rules, hosts=hosts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len({unit for unit, _ in waits}) >= 3
    assert all(unit == starter for unit, starter in waits), waits


@on_ranks(2)
def test_an_unshard_in_advance_has_the_same_bits(rank: int, world_size: int) -> None:
    """Before FSDP's first forward, when it has no streams, and later."""
    model = wrapped(sharded(), policy(QUANTIZED, QUANTIZED | {"bits": 8}))
    for began in (False, True):
        if began:
            loss_of(model, rank, 0).backward()
        model.second.unshard()
        expected = [p.clone() for p in model.second.parameters()]
        model.second.reshard()
        model.second.unshard(async_op=True).wait()
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
