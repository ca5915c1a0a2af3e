"""A transformer of two blocks whose sizes divide by nothing, named as policies expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from support.gathering import gathered_in
from tagc.policy import data_parallel_policies

SHIPPED = sorted(set(data_parallel_policies()) - {"auto"})


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


def blocks() -> Any:
    torch.manual_seed(1)
    model: Any = nn.Sequential()
    model.layers = nn.Sequential(Block(), Block())
    return model


def sharded(policy: Any, model: Any = None, **options: Any) -> Any:
    """Blocks, each sharded. A shipped policy's get parameters in the dtype that it is for."""
    model = blocks() if model is None else model
    options |= gathered_in(policy) if isinstance(policy, str) else {}
    for block in model.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(5, 131, generator=torch.Generator().manual_seed(10 * step + rank))


def end_warm_up(handle: Any) -> None:
    """As if all its steps had been."""
    for reducer in handle.reducers:
        reducer.counters.steps = reducer.plan.warmup_steps
