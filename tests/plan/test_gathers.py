"""The copy that changes are added to: one subtraction for segments with short gaps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.states import POLICIES, run, snapshot, wrapped
from tagc.ops.launches import Subtract
from tagc.plan import gathers


def test_short_gaps_are_joined() -> None:
    gap = gathers._GAP
    ends = [(3, 5), (5, 9), (9 + gap, 20 + gap), (21 + 2 * gap, 22 + 2 * gap)]
    segments: Any = [SimpleNamespace(start=start, stop=stop) for start, stop in ends]
    assert gathers._joined(segments) == [slice(3, 20 + gap), slice(*ends[-1])]
    assert gathers._joined([]) == []


@on_ranks(2)
def test_gaps_change_no_bits(rank: int, world_size: int) -> None:
    joined = wrapped(POLICIES["changes in 2 bits"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathers, "_GAP", 0)
        apart = wrapped(POLICIES["changes in 2 bits"])
    spans = []
    for model in (joined, apart):
        programs = [g._programs.changes for g in tagc.compressor(model).gatherers]
        steps = [step for program in programs for step in program.steps]
        spans.append(sum(isinstance(getattr(s, "operator", None), Subtract) for s in steps))
    assert 0 < spans[0] < spans[1]
    for model in (joined, apart):
        run(model, rank, range(4))
    equal(snapshot(joined), snapshot(apart))
