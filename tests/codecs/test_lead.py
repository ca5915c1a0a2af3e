"""A lead: the owner of a shard undoes the lag of error feedback. And codec `matrix` on ranks.

A reducer without a lead sends the same messages, and hands out what was sent: the other's formula
is over that.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.distributed import on_ranks
from support.marks import covering, slow
from support.replicated_net import of_replicas
from support.replicated_net import wrapped as replicated
from support.small_net import local_weights, train
from support.units import matrix_plan, normal, reduce, unit_reducer
from tagc.collect import UnitReducer
from tagc.plan import UnitPlan, bytes_in_step

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

EXACT: Any = {"rtol": 0, "atol": 0}
CODECS: dict[str, dict[str, Any]] = {
    "matrix 1 bit": {"kind": "matrix", "level": 1.3},
    "matrix 1 of 8": {"kind": "matrix", "group": 8},
    "quantized 4": {"kind": "quantized", "bits": 4, "block": 64},
    "shared": {"kind": "sketch", "density": 0.9, "symbol": "int8x4", "support": "shared"},
    "sketch": {"kind": "sketch", "density": 0.1, "symbol": "int8x4"},
}
by_codec = pytest.mark.parametrize("codec", CODECS)


def leading(lead: float, **more: Any) -> dict[str, Any]:
    return {"kind": "residual", "lead": lead, **more}


def spans(plan: UnitPlan) -> list[slice]:
    return [slice(s.start, s.stop) for s in plan.compressed]


def last_sums(reducer: UnitReducer) -> list[Tensor]:
    """`Q` of every segment, `[columns]`."""
    return [q[0] for q in reducer.owner_states.values()]


@pytest.mark.some(3)
@on_ranks(2, slow(3))
@pytest.mark.parametrize(("codec", "op"), covering(CODECS, ["SUM", "AVG"]))
def test_what_is_handed_out_is_the_formula(rank: int, world_size: int, codec: str, op: str) -> None:
    """Operation by operation, in float32; nothing of it changes what is sent or owed."""
    lead = 0.3
    plan = matrix_plan(world_size, CODECS[codec], leading(lead))
    ahead = unit_reducer(plan)
    plain = unit_reducer(matrix_plan(world_size, CODECS[codec], {"kind": "residual"}))
    before = [torch.zeros(s.columns) for s in plan.compressed]
    for step in range(5):
        buffer = normal(world_size, plan.columns, step)[rank]
        out, sent = (reduce(each, buffer, getattr(dist.ReduceOp, op)) for each in (ahead, plain))
        for i, span in enumerate(spans(plan)):
            expected = (sent[span] - (1 - lead) * before[i]) / lead
            torch.testing.assert_close(out[span], expected, **EXACT)
            torch.testing.assert_close(last_sums(ahead)[i], sent[span], **EXACT)
            before[i] = sent[span].clone()
        for segment in plan.dense:
            span = slice(segment.start, segment.stop)
            torch.testing.assert_close(out[span], sent[span], **EXACT)
        for one, other in zip(ahead.residuals.values(), plain.residuals.values(), strict=True):
            torch.testing.assert_close(one, other, **EXACT)
    assert all(q.any() for q in last_sums(ahead))
    assert not plain.owner_states


@on_ranks(2)
@pytest.mark.parametrize("codec", [c for c in CODECS if c != "quantized 4"])
def test_a_warm_up_leaves_no_lag(rank: int, world_size: int, codec: str) -> None:
    plan = matrix_plan(world_size, CODECS[codec] | {"warmup_steps": 2}, leading(0.5))
    reducer = unit_reducer(plan)
    for step in range(3):
        buffers = normal(world_size, plan.columns, step)
        out = reduce(reducer, buffers[rank])
        if step < plan.warmup_steps:
            torch.testing.assert_close(out, buffers[:, rank].sum(0) / 2, **EXACT)
            assert not any(q.any() for q in last_sums(reducer))
            assert not any(e.any() for e in reducer.residuals.values())
        else:
            for i, span in enumerate(spans(plan)):
                torch.testing.assert_close(out[span], last_sums(reducer)[i] / 0.5, **EXACT)
                assert out[span].any()


@on_ranks(2)
@by_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_once(rank: int, world_size: int, codec: str, bad: float) -> None:
    plan = matrix_plan(world_size, CODECS[codec], leading(0.4))
    reducer = unit_reducer(plan)
    column = spans(plan)[0].start + 5
    for step in range(5):
        buffers = normal(world_size, plan.columns, step)
        if step == 3:
            buffers[0, 1, column] = bad  # seen by rank 0, owned by rank 1
        out = reduce(reducer, buffers[rank])
        assert bool(out[column].isnan()) == (step == 3 and rank == 1)
        if step != 3 or rank == 0:
            assert out.isfinite().all()
        assert out[spans(plan)[1]].isfinite().all()
        if CODECS[codec]["kind"] == "matrix" and step == 3 and rank == 1:
            # Of the row of 70 elements only.
            assert out[spans(plan)[0]].isnan().nonzero().flatten().tolist() == list(range(70))
        assert all(q.isfinite().all() for q in last_sums(reducer))
        assert all(e.isfinite().all() for e in reducer.residuals.values())


def test_it_stores_the_last_sum_too() -> None:
    codec = CODECS["quantized 4"]
    plain, ahead = (matrix_plan(4, codec, f) for f in ({"kind": "residual"}, leading(0.5)))
    for a, b in zip(plain.compressed, ahead.compressed, strict=True):
        assert ahead.stored_bytes(b) == plain.stored_bytes(a) + 4 * a.columns
    assert bytes_in_step(ahead) == bytes_in_step(plain)
    # A lead of all is none.
    assert matrix_plan(4, codec, leading(1)) == plain


@on_ranks(4)
@pytest.mark.parametrize("codec", ["matrix 1 of 8", slow("quantized 4")])
def test_copies_keep_the_same(rank: int, world_size: int, codec: str) -> None:
    """Across replicas everybody hands out, and alike."""
    rule = {"when": {"name": ["first.*.weight", "second.*.weight"]}, "codec": CODECS[codec]}
    rule |= {"feedback": leading(0.5)}
    dense = [{"when": {}, "codec": {"kind": "dense"}}]
    model, mesh = replicated({"gradients": dense, "replicas": [rule]})
    plain, _ = replicated({"gradients": dense})
    train(model, rank, 6)
    train(plain, rank, 6)
    state = tagc.compressor(model).state_dict()
    found = 0
    for name, tensor in state.items():
        if ".sent.replicas." in name:
            one, other = of_replicas(tensor, mesh)
            torch.testing.assert_close(one, other, **EXACT)
            found += bool(one.any())
    assert found == 4
    for weight in local_weights(model).values():
        one, other = of_replicas(weight, mesh)
        torch.testing.assert_close(one, other, **EXACT)
    mine, exact = local_weights(model), local_weights(plain)
    assert any(not torch.equal(mine[n], exact[n]) for n in mine)


# Codec matrix
