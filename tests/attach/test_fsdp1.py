"""FSDP1: its flat buffers. Its options are in the parity matrix (`tests/parity`), sums of gradients
and residuals in `tests/collect/test_conservation.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tagc
from support.block_net import wrap
from support.counting import counted_bytes
from support.distributed import on_ranks
from support.fsdp1_net import UNITS, owners_in, sharded
from support.gathering import INT8
from support.small_net import loss_of
from support.units import gathered, policy


def grads_of(model: Any) -> list[Tensor]:
    """This rank's shard of every unit."""
    return [p.grad for p in model.parameters() if p.grad is not None]


@on_ranks(4)
def test_gradients_are_where_fsdp1_has_them(rank: int, world_size: int) -> None:
    """Weights in 8 bits, and all others, which lie among them, as they are."""
    native, model = sharded(), sharded()
    rule = {"when": {"name": "*.weight"}, "codec": INT8}
    wrap(model, {"schema": 1, "gradients": [rule]})
    for each in (native, model):
        loss_of(each, rank, 0).backward()
    compressed = False
    for unit, mine, theirs in zip(UNITS, grads_of(model), grads_of(native), strict=True):
        here = owners_in(unit, world_size)[rank * len(theirs) : (rank + 1) * len(theirs)]
        is_weight = torch.tensor([name.endswith("weight") for name in here])
        torch.testing.assert_close(mine[~is_weight], theirs[~is_weight])
        assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()
        compressed |= not torch.equal(mine, theirs)
    assert compressed


@on_ranks(3)
def test_wire_bytes(rank: int, world_size: int) -> None:
    """Counted by the metrics, by the plan and from the tensors that collectives get; dense bytes
    are those of FSDP1's own buffer."""
    model = wrap(sharded(), policy(({"name": "second.*.weight"}, 0.2)))
    compressor = tagc.compressor(model)
    loss_of(model, rank, 0).backward()
    before = compressor.metrics()
    with counted_bytes() as handed:
        loss_of(model, rank, 1).backward()
    after = compressor.metrics()
    buffers = [len(owners_in(unit, world_size)) for unit in UNITS]
    dense = sum(4 * n // world_size * (world_size - 1) for n in buffers)
    rows = compressor.plan().rows
    assert after.dense_bytes - before.dense_bytes == dense
    assert sum(row.dense_bytes for row in rows) == pytest.approx(dense, rel=1e-12)
    wire = after.wire_bytes - before.wire_bytes
    assert wire == sum(handed)
    # What a rank sends depends on what the others own; the plan has the average.
    average = gathered(torch.tensor([wire])).double().mean().item()
    assert average == pytest.approx(sum(row.wire_bytes for row in rows), rel=1e-12)
