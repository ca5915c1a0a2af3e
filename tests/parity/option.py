"""One way to use FSDP, and what both versions of FSDP have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from .model import loss_of


def once(model: Any, rank: int, step: int, **how: Any) -> None:
    loss_of(model, rank, step, **how).backward()


def nothing(model: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to use FSDP.

    Attributes:
        net: arguments of :class:`Net`.
        prepare: changes the model before it is sharded.
        shard: shards it, for this API; returns what FSDP1 makes of it.
        configure: calls FSDP's setters.
        backward: one step's backwards.
        after: what follows them, before the optimizer.
        sums: whether FSDP reduces with SUM, not AVG.
        divides: by what FSDP divides after that, given the ranks.
        resumes: whether tagc's state is saved between two steps, and loaded after one step more.
        ranks: numbers of ranks that make sense.
        names: parameters that a policy compresses, for FSDP1, which lays out all others apart.
        refused: words of the error that a policy which compresses must raise.
        refused_dense: words of the error that policy `dense` must raise, or native FSDP.
    """

    net: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] = nothing
    shard: Callable[..., Any]
    configure: Callable[[Any], None] = nothing
    backward: Callable[..., None] = once
    after: Callable[[Any], None] = nothing
    sums: bool = False
    divides: Callable[[int], float] = lambda ranks: 1
    resumes: bool = False
    ranks: Sequence[int] = (2, 3, 2, 3, 4, 2, 3, 5)
    names: str = "*"
    refused: str = ""
    refused_dense: str = ""


def wrap_blocks(model: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def compile_blocks(model: Any, backend: str = "aot_eager") -> None:
    import torch._dynamo  # takes a second

    torch._dynamo.reset()  # it compiles the same code for a few models only
    # Its own: it looks whether an activation has a gradient.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    for block in model.blocks:
        block.compile(backend=backend)


def freeze_some(model: Any) -> None:
    model.embed.requires_grad_(False)
    model.blocks[0].norm.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)


def freeze_a_unit(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def synced(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        loss_of(model, rank, 3 * step + micro).backward()


def on_even_ranks(model: Any, rank: int, step: int) -> None:
    once(model, rank, step, take_extra=rank % 2 == 0)
