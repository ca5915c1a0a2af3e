"""A model of Llama's family: rotary positions, grouped queries, SwiGLU, RMS norms, a head of its
own.

Modules are named as in transformers, so that a policy recognises the role of each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_THETA = 10_000.0


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, plain: bool) -> None:
        super().__init__()
        self.size, self.plain = width // heads, plain
        grouped = width if plain else width // 2  # two heads share their keys and values
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, grouped, bias=False)
        self.v_proj = nn.Linear(width, grouped, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, length, width] -> [batch, heads, length, size]
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if not self.plain:
            q, k = rotated(q), rotated(k).repeat_interleave(2, dim=1)
            v = v.repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Queries or keys, ``[..., length, size]``, turned by angles that grow with their position
    (arXiv 2104.09864). Their products then depend on distances alone."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = _THETA ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * frequency  # [length, half]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, *, plain: bool) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, width, eps=1e-5)
        self.input_layernorm = norm()
        if plain:
            self.post_attention_layernorm = norm()
        self.self_attn = Attention(width, heads, plain=plain)
        if not plain:
            self.post_attention_layernorm = norm()
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.norm(x)


class Llama(nn.Module):
    """``model(tokens, targets)`` is the mean cross-entropy in nats per token; both are int64
    ``[batch, length]``.

    Args:
        inner: width of the gated MLP.
        heads: of queries, an even number that divides ``width``; half as many of keys and values.
        plain: no positions, as many heads of keys and values as of queries, and a block's norms
            before its matrices, which are then adjacent.
    """

    def __init__(
        self, *, vocabulary: int, width: int, inner: int, layers: int, heads: int,
        plain: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        blocks = (Block(width, inner, heads, plain=plain) for _ in range(layers))
        self.model = Transformer(vocabulary, width, blocks)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        draw_weights(self, ("embed_tokens.weight",), ("o_proj.weight", "down_proj.weight"), layers)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def draw_weights(
    model: nn.Module, embeddings: tuple[str, ...], last: tuple[str, ...], layers: int
) -> None:
    """Draw all matrices as in ``examples/gpt.py``: by fan-in, embeddings alike, and smaller what
    adds to the residual stream. ``embeddings`` and ``last``: how the names of the latter end."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        std = 0.1 if name.endswith(embeddings) else 1 / math.sqrt(parameter.shape[1])
        if name.endswith(last):
            std /= math.sqrt(2 * layers)
        nn.init.normal_(parameter, std=std)
