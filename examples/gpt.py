"""A byte-level GPT small enough to train on two CPU cores: pre-norm, learned positions.

Modules are named as in GPT-2 and nanoGPT (`transformer.h.0.attn.c_attn`, ...), so that a policy
recognises the role of each parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of the model; the default has 1.33 M parameters."""

    vocab: int = 256
    context: int = 128
    width: int = 160
    layers: int = 4
    heads: int = 5

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class Linear(nn.Linear):
    """Without bias. On a CPU, bf16 is multiplied in fp32 and rounded: there, without instructions
    of its own, it takes 15 times as long."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return F.linear(x.float(), self.weight.float()).to(x.dtype)
        return super().forward(x)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = Linear(config.width, 3 * config.width)
        self.c_proj = Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [batch, length, 3·width] -> three of [batch, heads, length, width / heads]
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.width, 4 * config.width)
        self.c_proj = Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class GPT(nn.Module):
    """`model(tokens, targets)` is the mean cross-entropy in nats per byte.

    Both are int64 `[batch, length]` with length at most `config.context`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        self.lm_head = Linear(config.width, config.vocab)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            embedding = name.endswith(("wte.weight", "wpe.weight"))
            # By fan-in: GPT-2's 0.02 suits its widths, but learns slowly at this one.
            std = 0.1 if embedding else 1 / math.sqrt(parameter.shape[1])
            if name.endswith("c_proj.weight"):
                # Each layer adds twice to the residual stream; keep the sum's size.
                std /= math.sqrt(2 * config.layers)
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.transformer(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
