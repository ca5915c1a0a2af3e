"""How people use FSDP1 and DDP."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from .model import loss_of
from .option import (
    Option,
    freeze_a_unit,
    freeze_some,
    on_even_ranks,
    once,
    some,
    synced,
    two_by_two,
    wrap_blocks,
)


def nested(model: Any, **options: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def hybrid(model: Any, **options: Any) -> Any:
    strategy = ShardingStrategy.HYBRID_SHARD
    return nested(model, device_mesh=two_by_two(), sharding_strategy=strategy, **options)


def not_sharded(model: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD", category=FutureWarning)
        return nested(model, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


def own_hook(state: Any, grad: Tensor, shard: Tensor) -> None: ...


def in_no_sync(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        with nullcontext() if micro == 2 else model.no_sync():
            loss_of(model, rank, 3 * step + micro).backward()


def clip_shards(model: Any) -> None:
    model.clip_grad_norm_(0.1)


ORIGINAL = partial(nested, use_orig_params=True)
FSDP1: dict[str, Option] = {
    "plain": Option(shard=nested),
    "use_orig_params": Option(shard=ORIGINAL, ranks=(3,)),
    "weights compressed": Option(shard=nested, names="*weight", ranks=(3,)),
    "weights compressed, use_orig_params": Option(shard=ORIGINAL, names="*weight", ranks=(4,)),
    "SHARD_GRAD_OP": Option(
        shard=partial(nested, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), ranks=(2,)
    ),
    "one unit": Option(shard=FullyShardedDataParallel),
    "no_sync": Option(shard=nested, backward=in_no_sync),
    "no_sync, use_orig_params": Option(shard=ORIGINAL, backward=in_no_sync),
    "accumulation with sync": Option(shard=nested, backward=synced),
    "clip_grad_norm_, use_orig_params": Option(shard=ORIGINAL, after=clip_shards),
    "some parameters frozen": Option(prepare=freeze_some, shard=ORIGINAL),
    "a unit frozen": Option(prepare=freeze_a_unit, shard=nested),
    "unused on odd ranks": Option(net={"extra": True}, shard=nested, backward=on_even_ranks),
    "tied weights": Option(net={"tied": True}, shard=nested),
    "checkpoint inside": Option(net={"recompute": True}, shard=nested),
    "checkpoint_wrapper": Option(prepare=wrap_blocks, shard=nested),
    "units called twice": Option(net={"times": 2}, shard=nested),
    "HYBRID_SHARD": Option(
        shard=hybrid,
        ranks=(4,),
        refused="sharded and replicated (HYBRID_SHARD)",
        refused_dense="sharded and replicated (HYBRID_SHARD)",
    ),
    "NO_SHARD": Option(
        shard=not_sharded,
        refused="replicated, not sharded (NO_SHARD)",
        refused_dense="replicated, not sharded (NO_SHARD)",
    ),
    "a communication hook": Option(
        shard=nested,
        configure=lambda model: model.register_comm_hook(None, own_hook),
        refused="has its own communication hook (own_hook",
        refused_dense="has its own communication hook (own_hook",
    ),
}


# DDP


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
DDP_HOSTS: dict[str, Option] = {
    **some(
        DDP,
        "plain; one bucket; static_graph, gradient_as_bucket_view; find_unused_parameters; "
        "find_unused_parameters, in some steps; no_sync; accumulation with sync; tied weights; "
        "resumed",
        ranks=(4,),
    ),
    "three hosts": Option(shard=SMALL, ranks=(6,)),
}
