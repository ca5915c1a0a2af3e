"""FSDP1: its flat buffers. Its options are in the parity matrix (`tests/parity`), sums of gradients
and residuals in `tests/collect/test_conservation.py`, bytes in `test_fsdp2.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.block_net import wrap
from support.distributed import on_ranks
from support.fsdp1_net import UNITS, owners_in, sharded
from support.gathering import INT8
from support.small_net import loss_of


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
