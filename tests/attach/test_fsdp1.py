"""FSDP1: its flat buffers, its life, and what is refused. Its options are in the parity matrix
(`tests/parity`), sums of gradients and residuals in `tests/collect/test_conservation.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tagc
from support.counting import counted_bytes
from support.distributed import on_ranks
from support.exact import EXACT
from support.fsdp1_net import (
    CPU,
    FSDP,
    UNITS,
    flat_of,
    nested,
    quietly,
    sharded,
    train,
)
from support.gathering import INT8
from support.small_net import loss_of, net
from support.units import gathered, policy


def grads_of(model: Any) -> list[Tensor]:
    """This rank's shard of every unit."""
    return [p.grad for p in model.parameters() if p.grad is not None]


@on_ranks(4)
def test_gradients_are_where_fsdp1_has_them(rank: int, world_size: int) -> None:
    """Weights in 8 bits, and all others, which lie among them, as they are."""
    native, model = sharded(), sharded()
    rule = {"when": {"name": "*.weight"}, "codec": INT8}
    quietly(tagc.wrap, model, {"schema": 1, "gradients": [rule]})
    for each in (native, model):
        loss_of(each, rank, 0).backward()
    compressed = False
    for unit, mine, theirs in zip(UNITS, grads_of(model), grads_of(native), strict=True):
        _, owners = flat_of(unit, dict(net().named_parameters()), world_size, False)
        here = owners[rank * len(theirs) : (rank + 1) * len(theirs)]
        is_weight = torch.tensor([name.endswith("weight") for name in here])
        torch.testing.assert_close(mine[~is_weight], theirs[~is_weight])
        assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()
        compressed |= not torch.equal(mine, theirs)
    assert compressed


@on_ranks(3)
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
    codec = {"kind": "quantized", "bits": 8, "block": 32}
    rule = {"when": {"name": "second.0.weight"}, "codec": codec}
    model = quietly(tagc.wrap, sharded(), {"schema": 1, "gradients": [rule]})
    loss_of(model, rank, 0).backward()
    (reducer,) = (r for r in tagc.compressor(model).reducers if r.plan.compressed)
    quantized = reducer.plan.compressed[0].codec.words
    room = -(-quantized // 4) * 4  # the dense segment begins at a multiple of 4 words
    words = sum((room if dense else quantized) * has + dense for has, dense in OWNED[world_size])
    sent = gathered(torch.tensor([reducer.wire_bytes])).sum().item()
    assert sent == 4 * (world_size - 1) * words
    assert words < 0.75 * world_size * reducer.plan.words


# Its life


@on_ranks(2)
def test_names_are_the_users(rank: int, world_size: int) -> None:
    """Without what FSDP1 and checkpointing put into them."""
    model = nested(lambda m: FSDP(checkpoint_wrapper(m), device_id=CPU))
    quietly(tagc.wrap, model, policy(({"name": "second.2.weight"}, 0.3)))
    plan = tagc.compressor(model).plan()
    assert {row.param for row in plan.rows} == {name for name, _ in net().named_parameters()}
    assert {unit.info.name for unit in plan.units} == set(UNITS)
    assert [row.param for row in plan.rows if row.codec != "dense"] == ["second.2.weight"]
    loss_of(model, rank, 0).backward()
    assert tagc.compressor(model).metrics().steps == 1


@on_ranks(2)
def test_several_roots_in_a_plain_module(rank: int, world_size: int) -> None:
    def two_roots() -> Any:
        model: Any = net()
        for name in ("first", "second", "norm", "head"):
            setattr(model, name, FSDP(getattr(model, name), device_id=CPU, use_orig_params=True))
        return model

    native, wrapped = two_roots(), two_roots()
    tagc.wrap(wrapped, "dense")
    torch.testing.assert_close(train(wrapped, rank, 2), train(native, rank, 2), **EXACT)
    tagc.compressor(wrapped).remove()
    assert all(module._comm_hook is None for module in FSDP.fsdp_modules(wrapped))
