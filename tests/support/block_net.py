"""The model of `parity`, sharded by blocks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tagc
from parity.fsdp2_options import by_block
from parity.model import Net

WEIGHTS = {
    "schema": 1,
    "gradients": [
        {"when": {"name": "*.weight"}, "codec": {"kind": "quantized", "bits": 4, "block": 32}}
    ],
}


def net(**how: Any) -> Any:
    torch.manual_seed(1)
    return Net(**how)


def sharded(model: Any, **options: Any) -> Any:
    by_block(model, **options)
    return model


def wrap(model: Any, policy: Any = WEIGHTS, **how: Any) -> Any:
    with warnings.catch_warnings():
        # Units as small as these may send more when compressed.
        warnings.simplefilter("ignore")
        return tagc.wrap(model, policy, **how)


def grads(module: nn.Module) -> dict[str, Tensor]:
    """This rank's part of every existing gradient; unsharded parameters have whole ones."""
    found: dict[str, Any] = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {n: g.to_local().clone() if isinstance(g, DTensor) else g for n, g in found.items()}


class Twice(nn.Module):
    """Calls its block twice, once in a checkpoint."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed(tokens)
        for block in (*self.model.blocks, *self.model.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return self.model.head(x)


def recomputing() -> Any:
    """A model whose sharded blocks are each called twice, in checkpoints around them."""
    model = net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(Twice(model))
