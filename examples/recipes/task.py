"""What the recipes train: a small transformer that learns to repeat a sequence backwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 64, 128, 16


class Reverser(nn.Module):
    """Logits ``[batch, LENGTH, VOCABULARY]`` of tokens ``[batch, LENGTH]`` read backwards."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Tokens ``[32, LENGTH]``, other ones in each step and on each rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (32, LENGTH), generator=generator).to(device)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy against the tokens backwards."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())
