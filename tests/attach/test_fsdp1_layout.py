"""FSDP1's flat buffers: which elements a unit is handed, and where those that it returns go."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tagc
from support.counting import counted_bytes
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import (
    UNITS,
    WEIGHTS,
    flat_of,
    local_grads,
    quietly,
    sharded,
)
from support.fsdp1_recording import recorded
from support.marks import covering
from support.small_net import EVERYTHING, loss_of, net
from support.units import gathered, policy
from tagc.plan.flat_rows import is_rearranged
from tagc.plan.param_slices import param_slices


def check_layout(calls: list, grads: dict[str, Tensor], rank: int, use_orig_params: bool) -> None:
    """All that a unit is handed is this rank's own gradient, element by element, and all that it
    returns goes where FSDP1 has it."""
    world_size = dist.get_world_size()
    assert sorted(reducer.plan.info.name for reducer, *_ in calls) == sorted(UNITS)
    for reducer, inp, out, rows, shard in calls:
        buffer, owners = flat_of(reducer.plan.info.name, grads, world_size, use_orig_params)
        # Unaligned views may take other kernels than the parameters of the model alone.
        torch.testing.assert_close(inp, buffer, **(EXACT if use_orig_params else {}))
        S = len(buffer) // world_size
        by_row = [owners[row * S : (row + 1) * S] for row in range(world_size)]
        expected = torch.zeros(S)
        for segment in reducer.plan.segments:
            names = {param.name for param in segment.params}
            for row, theirs in enumerate(by_row):
                mask = torch.tensor([owner in names for owner in theirs])
                mine = inp.view(world_size, S)[row][mask]
                handed = rows.view(world_size, -1)[row, segment.start : segment.stop]
                torch.testing.assert_close(handed[: len(mine)], mine, **EXACT)
                assert not handed[len(mine) :].any()
                if row == rank:
                    expected[mask] = shard[segment.start : segment.start + len(mine)]
        torch.testing.assert_close(out, expected, **EXACT)


@on_ranks()
@pytest.mark.parametrize(("world_size", "use_orig_params"), covering((2, 3, 4), (False, True)))
def test_segments_are_handed_their_parameters(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    alone = net()
    model = quietly(tagc.wrap, sharded(use_orig_params=use_orig_params), WEIGHTS)
    plan = tagc.compressor(model).plan()
    (second,) = (unit for unit in plan.units if unit.info.name == "second")
    assert [segment.role for segment in second.segments] == ["other", "other"]
    straddling = [
        piece for piece in param_slices(second.info, second.info.params) if piece.offset > 0
    ]
    assert straddling
    loss_of(alone, rank, 0).backward()
    with recorded() as calls:
        loss_of(model, rank, 0).backward()
    grads = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    check_layout(calls, grads, rank, use_orig_params)
    assert {row.param for row in plan.rows} == set(grads)
    assert {row.shape for row in plan.rows} == {tuple(grad.shape) for grad in grads.values()}


@on_ranks(2, 3)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_one_rule_for_a_unit_takes_the_buffer_itself(
    rank: int, world_size: int, use_orig_params: bool
) -> None:
    model = quietly(tagc.wrap, sharded(use_orig_params=use_orig_params), EVERYTHING)
    for reducer in tagc.compressor(model).reducers:
        assert not is_rearranged(reducer.plan)
        (segment,) = reducer.plan.segments
        assert segment.columns == reducer.plan.buffer_columns
        for piece in param_slices(reducer.plan.info, segment.params):
            assert piece.column == piece.start
    loss_of(model, rank, 0).backward()


@on_ranks()
@pytest.mark.parametrize(("world_size", "use_orig_params"), covering((2, 3), (False, True)))
def test_accumulation(rank: int, world_size: int, use_orig_params: bool) -> None:
    """In ``no_sync`` micro-batches are reduced once; without it, each on its own."""
    alone = net()
    model = quietly(tagc.wrap, sharded(use_orig_params=use_orig_params), WEIGHTS)
    for step in range(2):
        alone.zero_grad()
        model.zero_grad()
        for micro in range(3):
            with recorded() as calls, nullcontext() if micro == 2 else model.no_sync():
                loss_of(alone, rank, 3 * step + micro).backward()
                loss_of(model, rank, 3 * step + micro).backward()
            assert bool(calls) == (micro == 2)
        grads = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        check_layout(calls, grads, rank, use_orig_params)
        assert tagc.compressor(model).metrics().steps == step + 1

    native, dense = (sharded(use_orig_params=use_orig_params) for _ in range(2))
    tagc.wrap(dense, "dense")
    for micro in range(3):
        for model in (native, dense):
            loss_of(model, rank, micro).backward()
    torch.testing.assert_close(local_grads(dense), local_grads(native), **EXACT)
    assert tagc.compressor(dense).metrics().steps == 3


@on_ranks(2, 3)
def test_wire_bytes(rank: int, world_size: int) -> None:
    """Counted by the metrics, by the plan and from the tensors that collectives get; dense bytes
    are those of FSDP1's own buffer."""
    model = quietly(tagc.wrap, sharded(), policy(({"name": "second.*.weight"}, 0.2)))
    compressor = tagc.compressor(model)
    loss_of(model, rank, 0).backward()
    before = compressor.metrics()
    with counted_bytes() as handed:
        loss_of(model, rank, 1).backward()
    after = compressor.metrics()
    buffers = [
        flat_of(unit, dict(net().named_parameters()), world_size, False)[0].numel()
        for unit in UNITS
    ]
    dense = sum(4 * n // world_size * (world_size - 1) for n in buffers)
    rows = compressor.plan().rows
    assert after.dense_bytes - before.dense_bytes == dense
    assert sum(row.dense_bytes for row in rows) == pytest.approx(dense, rel=1e-12)
    wire = after.wire_bytes - before.wire_bytes
    assert wire == sum(handed)
    # What a rank sends depends on what the others own; the plan has the average.
    average = gathered(torch.tensor([wire])).double().mean().item()
    assert average == pytest.approx(sum(row.wire_bytes for row in rows), rel=1e-12)


# Of each row: whether it has any of `second.0.weight`, and its elements of the others.
OWNED = {
    3: ((True, 0), (True, 237), (False, 410)),
    4: ((True, 0), (True, 33), (False, 308), (False, 306)),
}


@on_ranks(3, 4)
def test_owners_get_what_they_own(rank: int, world_size: int) -> None:
    """Half of a unit in 8 bits, the other as it is; some rows have nothing of the one or other."""
    rule = {
        "when": {"name": "second.0.weight"},
        "codec": {"kind": "quantized", "bits": 8, "block": 32},
    }
    model = quietly(tagc.wrap, sharded(), {"schema": 1, "gradients": [rule]})
    loss_of(model, rank, 0).backward()
    (reducer,) = (r for r in tagc.compressor(model).reducers if r.plan.compressed)
    quantized = reducer.plan.compressed[0].codec.words
    room = -(-quantized // 4) * 4  # the dense segment begins at a multiple of 4 words
    words = sum((room if dense else quantized) * has + dense for has, dense in OWNED[world_size])
    sent = gathered(torch.tensor([reducer.wire_bytes])).sum().item()
    assert sent == 4 * (world_size - 1) * words
    assert words < 0.75 * world_size * reducer.plan.words
