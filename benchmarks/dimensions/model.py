"""A small transformer that can be split over tensor, expert and pipeline parallelism."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from examples.gpt import MLP, GPTConfig

from ..llama import Attention, draw_weights


@dataclass(frozen=True, kw_only=True)
class Size(GPTConfig):
    """Sizes of the model; the default has 0.86 M parameters, 2.4 M with 4 experts.

    Attributes:
        experts: feed-forward networks of a block, each token's best ones are used; 0 for one.
        best: how many experts each token uses.
        skew: how much less the router likes the last expert than the first, in nats.
    """

    context: int = 64
    width: int = 128
    heads: int = 4
    experts: int = 0
    best: int = 1
    skew: float = 0.0


class FeedForwards(nn.ModuleDict):
    """The experts of a rank, which FSDP2 can shard as one module."""

    def forward(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Each expert's tokens through it."""
        return [expert(part) for expert, part in zip(self.values(), parts, strict=True)]


class Experts(nn.Module):
    """Tokens to the ranks of their best experts, through them, and back.

    Attributes:
        tokens: how many of this rank's tokens every expert got so far.
        first: this rank's first expert.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.experts = FeedForwards({str(i): MLP(size) for i in range(size.experts)})
        self.total, self.best = size.experts, size.best
        self.bias = -size.skew * torch.linspace(0, 1, size.experts)
        self.tokens = torch.zeros(size.experts, dtype=torch.int64)
        self.group: dist.ProcessGroup | None = None
        self.first = 0

    def split(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's experts. They are numbered from 0 on every rank: what FSDP shards must
        have the same names on all ranks."""
        self.group, each = group, self.total // group.size()
        self.first = group.rank() * each
        kept = list(self.experts.values())[self.first : self.first + each]
        self.experts = FeedForwards({str(i): expert for i, expert in enumerate(kept)})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        gates, chosen = (self.router(tokens) + self.bias).softmax(-1).topk(self.best)
        chosen = chosen.flatten()  # of each token, one after the other
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.total)
        self.tokens += counts
        through = self._through(tokens[order // self.best], counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        parts = through[back].unflatten(0, (-1, self.best))  # [tokens, best, width]
        return (gates[..., None] * parts).sum(1).view_as(x)

    def _through(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """``tokens``, sorted by expert, through their experts."""
        if self.group is None:
            return torch.cat(self.experts(tokens.split(counts.tolist())))
        ranks = self.group.size()
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        by_rank = theirs.view(ranks, -1)
        sent = counts.view(ranks, -1).sum(1).tolist()
        received = by_rank.sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, received, sent, self.group)
        # From every rank, the tokens of every expert of this one.
        parts = arrived.split(by_rank.flatten().tolist())
        mine = [parts[i :: len(self.experts)] for i in range(len(self.experts))]
        done: list[Any] = [None] * len(parts)
        for i, out in enumerate(self.experts([torch.cat(each) for each in mine])):
            done[i :: len(self.experts)] = out.split([len(part) for part in mine[i]])
        return all_to_all_single_autograd(torch.cat(done), sent, received, self.group)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attn = Attention(size.width, size.heads, plain=True)
        self.mlp = Experts(size) if size.experts else MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Net(nn.Module):
    """Tokens to logits. A stage of a pipeline has some of the blocks, and perhaps neither the
    embedding nor the head; names stay those of the whole model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(size.vocab, size.width)
        self.place = nn.Parameter(torch.empty(size.context, size.width))
        self.blocks = nn.ModuleDict({str(i): Block(size) for i in range(size.layers)})
        self.head: nn.Module | None = nn.Sequential(
            OrderedDict(
                norm=nn.LayerNorm(size.width),
                out=nn.Linear(size.width, size.vocab, bias=False),
            )
        )
        last = ("o_proj.weight", "c_proj.weight")
        draw_weights(self, ("place", "embed.weight"), last, size.layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.place
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def keep_stage(self, stage: int, stages: int) -> None:
        """Drop what other stages have."""
        each = len(self.blocks) // stages
        for i in range(len(self.blocks)):
            if i // each != stage:
                del self.blocks[str(i)]
        if stage > 0:
            self.embed = None
            del self.place
        if stage < stages - 1:
            self.head = None


def split_tensors(blocks: Sequence[Block], mesh: DeviceMesh) -> None:
    """Tensor parallelism: columns, then rows, and an all-reduce of each output."""
    for block in blocks:
        # One input for the three, so that its gradient is reduced once.
        whole = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
        )
        plan: Any = {"attn": whole} | {f"attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"attn.o_proj": RowwiseParallel(), "mlp.c_fc": ColwiseParallel()}
        parallelize_module(block, mesh, plan | {"mlp.c_proj": RowwiseParallel()})
