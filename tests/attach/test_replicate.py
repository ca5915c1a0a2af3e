"""`replicate` on FSDP2's machinery: what is refused, and what `remove` restores.

Sums of gradients and residuals over its options are in the parity matrix (`tests/parity`), states
in `tests/checkpoint/test_layouts.py`.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tagc
from support.distributed import on_ranks
from support.exact import equal
from support.failing import fails
from support.small_net import loss_of, net
from support.states import POLICIES, wrapped
from tagc.attach import replicate as attachment


def replicated() -> Any:
    model = net()
    for module in (model.first, model.second, model):
        replicate(module)
    return model


def train(model: Any, rank: int, steps: range) -> dict[str, Tensor]:
    """The gradients of the last step."""
    found = {}
    for step in steps:
        loss_of(model, rank, step).backward()
        grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
        found = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
        model.zero_grad()
    return found


@on_ranks(2)
def test_removed_and_wrapped_again(rank: int, world_size: int) -> None:
    model, native = wrapped(POLICIES["quantized residual"], replicated()), replicated()
    train(model, rank, range(3))
    metrics = tagc.compressor(model).metrics()
    assert 0 < metrics.wire_bytes < metrics.dense_bytes / 2
    _, said = fails(lambda: tagc.wrap(model.first, POLICIES["quantized residual"]))
    assert "already wrapped" in said
    tagc.compressor(model).remove()
    equal(train(model, rank, range(3, 5)), train(native, rank, range(3, 5)))
    wrapped(POLICIES["quantized residual"], model)
    train(model, rank, range(5, 6))


@on_ranks(2)
def test_refused(rank: int, world_size: int) -> None:
    model = net()
    replicate(model.first)
    fully_shard(model.second)
    _, said = fails(lambda: tagc.wrap(model, "hybrid"))
    assert "partly by FSDP2 (fully_shard), partly by replicate (" in said

    rules = POLICIES["quantized residual"]
    _, said = fails(lambda: tagc.wrap(replicated(), rules | {"replicas": rules["gradients"]}))
    assert "with DDP and replicate() all ranks are replicas" in said

    with patch.object(attachment, "all_reduces_by_class", lambda: False):
        _, said = fails(lambda: tagc.wrap(replicated(), "hybrid"))
    assert "cannot replace the all-reduce of this version of torch; use Distributed" in said
