"""A transformer's block whose sizes divide by nothing, named as policies expect."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention without attention: only its parameters matter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(131)
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(131, 127), "o_proj": nn.Linear(127, 131)})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(131, 149), "down_proj": nn.Linear(149, 131)})

    def forward(self, x: Tensor) -> Tensor:
        for first, second in (self.attn.values(), self.mlp.values()):
            x = x + second(torch.tanh(first(self.norm(x))))
        return x
