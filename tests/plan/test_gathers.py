"""The copy that changes are added to: one subtraction for segments with short gaps."""

from __future__ import annotations

import pytest

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.states import POLICIES, run, snapshot, wrapped
from tagc.ops.launches import Subtract
from tagc.plan import gathers


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
