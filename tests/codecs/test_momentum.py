"""Feedback `momentum`: the owner hands out a moving average, and owes what ranks have not sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.distributed import on_ranks
from support.marks import covering
from support.units import codec_plan, gathered, normal, on_grid, reduce, unit_reducer
from tagc.comm import UnitReducer
from tagc.plan import UnitPlan

SUM = dist.ReduceOp.SUM
EXACT: Any = {"rtol": 0, "atol": 0}
HALF = {"kind": "momentum", "rate": 0.5}
CODECS: dict[str, dict[str, Any]] = {
    "quantized 4": {"kind": "quantized", "bits": 4, "block": 64},
    "quantized 2": {"kind": "quantized", "bits": 2},
    "packed 4": {"kind": "packed", "density": 0.1, "bits": 4},
    "packed 8 groups": {"kind": "packed", "density": 0.3, "bits": 8, "group": 4},
    "packed warmed up": {"kind": "packed", "density": 0.1, "bits": 4, "warmup_steps": 2},
    "shared": {"kind": "packed", "density": 0.3, "bits": 8, "support": "shared"},
    "sketch": {"kind": "sketch", "density": 0.1, "symbol": "int8x4"},
    "sketch warmed up": {"kind": "sketch", "density": 0.1, "symbol": "int16x2", "warmup_steps": 3},
    "shared sketch": {"kind": "sketch", "density": 0.5, "symbol": "int16x2", "support": "shared"},
}


def spans(plan: UnitPlan) -> list[slice]:
    return [slice(s.start, s.stop) for s in plan.compressed]


def averages(reducer: UnitReducer) -> list[Tensor]:
    return [average[0] for average in reducer.owner_states.values()]


@pytest.mark.some(3)
@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "codec", "ops"), covering((2, 4), CODECS, ["reference", "cpu"])
)
def test_the_average_and_what_is_owed_are_the_average_of_gradients(
    rank: int, world_size: int, ops: str, codec: str
) -> None:
    """To the bit: on a grid, and with a rate of one half, nothing rounds."""
    plan = codec_plan(world_size, CODECS[codec], HALF)
    reducer = unit_reducer(plan, ops)
    expected = torch.zeros(plan.columns, dtype=torch.float64)
    for step in range(5):
        buffers = on_grid(world_size, plan.columns, step)
        expected = 0.5 * expected + 0.5 * buffers[:, rank].double().sum(0)
        out = reduce(reducer, buffers[rank], SUM)
        for i, span in enumerate(spans(plan)):
            owed = gathered(list(reducer.residuals.values())[i])[:, rank].double().sum(0)
            torch.testing.assert_close(out[span].double() + owed, expected[span], **EXACT)
            assert owed.any() == (step >= plan.warmup_steps), step
    assert len(averages(reducer)) == 2


@pytest.mark.some(2)
@on_ranks(2)
@pytest.mark.parametrize("codec", ["quantized 4", "packed 4", "sketch"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_low_precision_gradient_is_averaged_in_float32(
    rank: int, world_size: int, codec: str, stored: str
) -> None:
    """The sum is off by roundings of float32 and of the residual's dtype, not by the buffer's."""
    feedback = {"kind": "momentum", "rate": 0.1, "dtype": stored}
    plan = codec_plan(world_size, CODECS[codec], feedback, dtype=torch.bfloat16)
    reducer = unit_reducer(plan)
    expected = torch.zeros(plan.columns, dtype=torch.float64)
    bound = torch.zeros_like(expected)
    for step in range(10):
        buffers = normal(world_size, plan.columns, step).bfloat16()
        expected = 0.9 * expected + 0.1 * buffers[:, rank].double().sum(0)
        out = reduce(reducer, buffers[rank], SUM)
        assert out.dtype == torch.bfloat16
        for i, span in enumerate(spans(plan)):
            average = averages(reducer)[i]
            torch.testing.assert_close(out[span], average.bfloat16(), **EXACT)
            owed = gathered(list(reducer.residuals.values())[i].float())[:, rank].double()
            size = average.double().abs() + owed.abs().sum(0) + buffers[:, rank, span].abs().sum(0)
            # Products, sums and what was sent, each half an ulp of less than the size; a residual
            # is rounded when it decays and when it is stored.
            bound[span] += 8 * 2**-24 * size
            if stored == "bfloat16":
                # It was larger before the codec: by what was sent, which the average now has.
                bound[span] += 2 * 2**-9 * size
            lost = (average.double() + owed.sum(0) - expected[span]).abs()
            assert (lost <= bound[span]).all(), (step, (lost / bound[span]).max())


@on_ranks(2)
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_shows_once(rank: int, world_size: int, codec: str) -> None:
    plan = codec_plan(world_size, CODECS[codec], {"kind": "momentum"})
    reducer = unit_reducer(plan)
    column = spans(plan)[0].start + 5
    for step in range(5):
        buffers = normal(world_size, plan.columns, step)
        if step == 3:
            buffers[0, 1, column] = float("nan")  # seen by rank 0, owned by rank 1
        out = reduce(reducer, buffers[rank])
        assert bool(out[column].isnan()) == (step == 3 and rank == 1)
        assert out[spans(plan)[1]].isfinite().all()
    assert all(r.isfinite().all() for r in reducer.residuals.values())
    assert all(average.isfinite().all() for average in averages(reducer))


def test_it_stores_an_average_of_the_shard_too() -> None:
    codec = CODECS["packed 4"]
    plain, smooth = (codec_plan(4, codec, {"kind": k}) for k in ("residual", "momentum"))
    for a, b in zip(plain.compressed, smooth.compressed, strict=True):
        assert smooth.stored_bytes(b) == plain.stored_bytes(a) + 4 * a.columns
        assert smooth.wire_bytes(b) == plain.wire_bytes(a)
    assert not averages(unit_reducer(plain))
