"""Units do not wait for each other: what a unit waits for, it has started itself.

On a GPU the three parts of a reduction run on FSDP's reduce-scatter stream, beside the backward,
and a wait is the stream's, not the host's; here the order of the parts and the waits are noted,
on gloo.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tagc
from support.distributed import run_ranks
from support.small_net import loss_of, sharded
from tagc.comm import UnitReducer
from tagc.comm.collectives import CollectiveWork

CODECS: dict[str, dict[str, Any]] = {
    "quantized": {"kind": "quantized", "bits": 4, "block": 32},
    "packed": {"kind": "packed", "density": 0.3},
    # Its counts are in flight until the unit's next step.
    "sketch": {"kind": "sketch", "density": 0.3, "symbol": "int8x4"},
}


class Notes:
    """What happens on a rank, in order.

    Attributes:
        parts: (what, unit) of every part of a reduction that began or ended.
        foreign: collectives that a unit waited for although another one had started them.
        waits: all that were waited for.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []
        self.foreign: list[tuple[str, str]] = []
        self.waits = 0
        self.unit = ""
        self._started: dict[int, str] = {}
        # Else a new one could get the name of one that is gone.
        self._kept: list[CollectiveWork] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        what, _, unit = name.removesuffix(")").partition(" (")
        self.parts.append((what.removeprefix("TAGC::"), unit))
        yield
        self.parts.append((f"{what.removeprefix('TAGC::')} ends", unit))

    def started(self, work: CollectiveWork) -> None:
        self._started[id(work)] = self.unit
        self._kept.append(work)

    def waited(self, work: CollectiveWork) -> None:
        self.waits += 1
        if self._started[id(work)] != self.unit:
            self.foreign.append((self.unit, self._started[id(work)]))


def noted(rank: int, codec: dict[str, Any], mixed_up: bool) -> Notes:
    rule = {"when": {"name": ["first*weight", "second*weight"]}, "codec": codec}
    notes = Notes()
    made, wait = CollectiveWork.__init__, CollectiveWork.wait
    last: list[CollectiveWork] = []

    reduce = UnitReducer.reduce

    def reduces(reducer: UnitReducer, *args: Any) -> None:
        notes.unit = reducer.plan.info.label
        reduce(reducer, *args)

    def make(work: CollectiveWork, *args: Any, **kwargs: Any) -> None:
        made(work, *args, **kwargs)
        notes.started(work)
        last.append(work)

    def waits(work: CollectiveWork) -> None:
        notes.waited(last[0] if mixed_up else work)
        wait(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tagc.comm.reducer.record_function", notes.part)
        patch.setattr(UnitReducer, "reduce", reduces)
        patch.setattr(CollectiveWork, "__init__", make)
        patch.setattr(CollectiveWork, "wait", waits)
        model = sharded()
        with warnings.catch_warnings():
            # Such small units pay with no codec.
            warnings.simplefilter("ignore", UserWarning)
            tagc.wrap(
                model, {"schema": 1, "gradients": [rule | {"feedback": {"kind": "residual"}}]}
            )
        for step in range(3):
            loss_of(model, rank, step).backward()
    notes._kept.clear()
    return notes


@pytest.mark.parametrize("codec", CODECS)
def test_a_unit_waits_for_its_own_collectives_only(codec):
    for notes in run_ranks(noted, 2, CODECS[codec], False):
        assert notes.waits
        assert notes.foreign == []
        ways = ["encode", "encode ends", "exchange", "exchange ends", "decode", "decode ends"]
        units = [unit for _, unit in notes.parts[:: len(ways)]]
        # One after the other on their one stream, in the order of the backward.
        assert notes.parts == [(way, unit) for unit in units for way in ways]
        assert units == ["second", "first.2", "first"] * 3


def test_a_wait_for_another_unit_would_be_seen():
    for notes in run_ranks(noted, 2, CODECS["quantized"], True):
        assert notes.foreign
