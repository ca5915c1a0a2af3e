"""The copy that changes are added to: one subtraction for segments with short gaps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.states import POLICIES, run, snapshot, wrapped
from tagc.collect import host_copy


def test_short_gaps_are_joined() -> None:
    gap = host_copy._GAP
    ends = [(3, 5), (5, 9), (9 + gap, 20 + gap), (21 + 2 * gap, 22 + 2 * gap)]
    segments: Any = [SimpleNamespace(start=start, stop=stop) for start, stop in ends]
    assert host_copy._joined(segments) == [slice(3, 20 + gap), slice(*ends[-1])]
    assert host_copy._joined([]) == []


@on_ranks(2)
def test_gaps_change_no_bits(rank: int, world_size: int) -> None:
    joined = wrapped(POLICIES["changes in 2 bits"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "_GAP", 0)
        apart = wrapped(POLICIES["changes in 2 bits"])
    gatherers: list[Any] = [tagc.compressor(model).gatherers for model in (joined, apart)]
    spans = [sum(len(gatherer.copy._spans) for gatherer in own) for own in gatherers]
    assert 0 < spans[0] < spans[1]
    for model in (joined, apart):
        run(model, rank, range(4))
    equal(snapshot(joined), snapshot(apart))
