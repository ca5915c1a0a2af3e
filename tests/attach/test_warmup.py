"""`warmup_steps`: the first reductions are native, then compression sets in."""

from __future__ import annotations

import torch

import tagc
from support.distributed import on_ranks
from support.exact import EXACT
from support.small_net import loss_of, sharded, train

# A unit's warm-up is its longest.
WARMUP = {
    "schema": 1,
    "gradients": [
        {"when": {"name": name}, "codec": {"kind": "sketch", "density": 0.2, "warmup_steps": steps}}
        for name, steps in (("*weight", 3), ("*", 1))
    ],
}


@on_ranks(2, 3)
def test_warmup_is_native_and_then_over(rank: int, world_size: int) -> None:
    native, wrapped = sharded(), tagc.wrap(sharded(), WARMUP)
    assert "after 3 uncompressed steps" in str(tagc.compressor(wrapped).plan())
    torch.testing.assert_close(train(wrapped, rank, 3), train(native, rank, 3), **EXACT)
    metrics = tagc.compressor(wrapped).metrics()
    assert metrics.wire_bytes == metrics.dense_bytes == tagc.compressor(wrapped).wire_bytes
    assert metrics.compressed_wire_bytes == metrics.compressed_dense_bytes
    assert metrics.residual_norm == 0

    loss_of(wrapped, rank, 3).backward()
    after = tagc.compressor(wrapped).metrics()
    assert after.steps == 4
    assert 0 < after.density < 1
    assert after.residual_norm > 0
