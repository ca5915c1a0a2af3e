"""How people use DDP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from .fsdp1_options import in_no_sync
from .option import Option, freeze_some, on_even_ranks, once, synced, wrap_blocks


def ddp(model: Any, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def on_odd_steps(model: Any, rank: int, step: int) -> None:
    once(model, rank, step, take_extra=step % 2 == 1)


SMALL = partial(ddp, bucket_cap_mb=0.002)
VIEWS = partial(SMALL, gradient_as_bucket_view=True)
STATIC = partial(SMALL, static_graph=True)
UNUSED = partial(SMALL, find_unused_parameters=True)
DDP: dict[str, Option] = {
    "plain": Option(shard=SMALL),
    "one bucket": Option(shard=ddp),
    "gradient_as_bucket_view": Option(shard=VIEWS),
    "static_graph": Option(shard=STATIC),
    "static_graph, gradient_as_bucket_view": Option(shard=partial(VIEWS, static_graph=True)),
    "find_unused_parameters": Option(net={"extra": True}, shard=UNUSED, backward=on_even_ranks),
    "find_unused_parameters, in some steps": Option(
        net={"extra": True}, shard=UNUSED, backward=on_odd_steps
    ),
    "find_unused_parameters, never used": Option(net={"extra": True}, shard=UNUSED),
    "static_graph, never used": Option(net={"extra": True}, shard=STATIC),
    "no_sync": Option(shard=SMALL, backward=in_no_sync),
    "no_sync, gradient_as_bucket_view": Option(shard=VIEWS, backward=in_no_sync),
    "no_sync, find_unused_parameters": Option(
        net={"extra": True}, shard=UNUSED, backward=in_no_sync
    ),
    "accumulation with sync": Option(shard=SMALL, backward=synced),
    "some parameters frozen": Option(prepare=freeze_some, shard=SMALL),
    "tied weights": Option(net={"tied": True}, shard=SMALL),
    "checkpoint inside": Option(net={"recompute": True}, shard=SMALL),
    "checkpoint inside, reentrant, static_graph": Option(
        net={"recompute": "reentrant"}, shard=STATIC
    ),
    "checkpoint_wrapper": Option(prepare=wrap_blocks, shard=SMALL),
    "blocks called twice": Option(net={"times": 2}, shard=SMALL),
    "resumed": Option(shard=SMALL, resumes=True),
}
# On hosts of two ranks.
HOSTS: dict[str, Option] = {
    name: replace(DDP[name], ranks=(4,))
    for name in (
        "plain",
        "one bucket",
        "static_graph, gradient_as_bucket_view",
        "find_unused_parameters",
        "find_unused_parameters, in some steps",
        "no_sync",
        "accumulation with sync",
        "tied weights",
        "resumed",
    )
} | {"three hosts": Option(shard=SMALL, ranks=(6,))}
