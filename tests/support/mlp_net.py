"""A model of MLP blocks, and a policy for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

MLP_ONLY = {
    "schema": 1,
    "gradients": [
        {
            "when": {"role": "mlp", "min_numel": 1},
            "codec": {"kind": "sketch", "density": 0.2},
        }
    ],
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 3 * width)
        self.down_proj = nn.Linear(3 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down_proj(torch.relu(self.up_proj(x))))


class Net(nn.Module):
    def __init__(self, width: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sharded(width: int = 9) -> Any:
    torch.manual_seed(0)
    model = Net(width)
    for layer in model.layers:
        fully_shard(layer)
    del model.unused
    return fully_shard(model)


def changed(**when_or_codec: Any) -> dict:
    """`MLP_ONLY` with keys of its only rule replaced."""
    return {"schema": 1, "gradients": [MLP_ONLY["gradients"][0] | when_or_codec]}


def backward(model: nn.Module, scale: float = 1.0) -> None:
    x = torch.linspace(-1, 1, 36).view(4, 9)
    (model(x) * scale * x).sum().backward()
