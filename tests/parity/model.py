"""The model that is sharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(
        self,
        *,
        recompute: bool | str = False,
        tied: bool = False,
        extra: bool = False,
        times: int = 1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 11)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(2))
        self.extra = nn.Linear(11, 11) if extra else None
        self.head = nn.Linear(11, 13, bias=False)
        self.times = times
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, *, take_extra: bool = False, without_head: bool = False
    ) -> Tensor:
        x = self.embed(tokens)
        for block in list(self.blocks) * self.times:
            x = block(x)
        if take_extra and self.extra is not None:
            x = self.extra(x)
        return x if without_head else self.head(x)


class Block(nn.Module):
    """11 rows divide by no number of ranks, 60 columns by all."""

    def __init__(self, recompute: bool | str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(11)
        self.up = nn.Linear(11, 60)
        self.down = nn.Linear(60, 11)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        inner = partial(checkpoint, self.inner, use_reentrant=self.recompute == "reentrant")
        return inner(x) if self.recompute else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def loss_of(model: nn.Module, rank: int, step: int, **how: Any) -> Tensor:
    tokens = tokens_of(rank, step)
    return _loss(model(tokens, **how), tokens, step)


def backward_in_chunks(model: Any, rank: int, step: int) -> None:
    """Logits and loss of one half of the batch after the other, each with a backward of its own as
    far as the head's input; then the rest of the model."""
    tokens = tokens_of(rank, step)
    hidden = model(tokens, without_head=True)
    leaf = hidden.detach().requires_grad_()
    for half, targets in zip(leaf.chunk(2), tokens.chunk(2), strict=True):
        _loss(model.head(half), targets, step).backward()
    hidden.backward(leaf.grad)


def tokens_of(rank: int, step: int) -> Tensor:
    return torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(97 * step + rank))


def _loss(logits: Tensor, targets: Tensor, step: int) -> Tensor:
    # The scale differs between steps, or residuals would not.
    return (1 + step) * nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
