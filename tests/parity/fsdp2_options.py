"""How people use FSDP2: on its own, with replicas, and with `replicate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.own_gather import gather_themselves

from .model import backward_in_chunks, loss_of
from .option import (
    Option,
    compile_blocks,
    freeze_a_unit,
    freeze_some,
    on_even_ranks,
    once,
    some,
    synced,
    two_by_two,
    wrap_blocks,
)


def by_block(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def in_one_unit(model: Any, **options: Any) -> None:
    fully_shard(model, **options)


def blocks_together(model: Any, **options: Any) -> None:
    fully_shard(list(model.blocks), **options)
    fully_shard(model, **options)


def ends_together(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard([model.embed, model.head], **options)
    fully_shard(model, **options)


def by_columns(model: Any, **options: Any) -> None:
    def place(p: Tensor) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] == 60 else None

    by_block(model, shard_placement_fn=place, **options)


def in_two_meshes(model: Any, **options: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )

    world = init_device_mesh("cpu", (dist.get_world_size(),))
    pairs = two_by_two()["shard"]

    one, other = (FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (pairs, world))

    def place(p: Tensor) -> Any:
        return ShardPlacementResult(Shard(0), one if p.ndim == 1 else other)

    for module in (*model.blocks, model):
        fully_shard(module, mesh=world, shard_placement_fn=place, **options)


def in_hybrid_mesh(model: Any, **options: Any) -> None:
    by_block(model, mesh=two_by_two(), **options)


def ends_together_in_hybrid_mesh(model: Any, **options: Any) -> None:
    ends_together(model, mesh=two_by_two(), **options)


def in_data_mesh(model: Any, **options: Any) -> None:
    by_block(model, mesh=two_by_two()["replicate"], **options)


def replicated(model: Any, **options: Any) -> None:
    for block in model.blocks:
        replicate(block, **options)
    replicate(model, **options)


def replicated_in_data_mesh(model: Any, **options: Any) -> None:
    replicated(model, mesh=two_by_two()["replicate"], **options)


def split_blocks(model: Any) -> None:
    """Tensor parallelism in pairs of ranks, which FSDP then shards across."""
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, two_by_two()["shard"], plan)


def each(call: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A setter that is not recursive, on every FSDP module."""

    def configure(model: Any) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                call(module)

    return configure


def both(*calls: Callable[[Any], None]) -> Callable[[Any], None]:
    def configure(model: Any) -> None:
        for call in calls:
            call(model)

    return configure


SUMS = each(lambda module: module.set_force_sum_reduction_for_comms(True))


def factor(value: float) -> Callable[[Any], None]:
    return each(lambda module: module.set_gradient_divide_factor(value))


def explicit_prefetch(model: Any) -> None:
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def unsynced(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def alike_in_pairs(model: Any, rank: int, step: int) -> None:
    once(model, rank // 2, step)


def last_flagged(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model.set_is_last_backward(micro == 2)
        model.set_requires_gradient_sync(micro == 2)
        model.set_reshard_after_backward(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def unsharded_between(model: Any, rank: int, step: int) -> None:
    model.set_reshard_after_backward(False)
    synced(model, rank, step)
    each(lambda module: module.reshard())(model)


def not_replicated(model: Any, rank: int, step: int) -> None:
    for micro in range(3):
        model.set_requires_all_reduce(micro == 2)
        loss_of(model, rank, 3 * step + micro).backward()


def freezing_later(model: Any, rank: int, step: int) -> None:
    model.head.requires_grad_(step == 0)
    once(model, rank, step)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def unused_reduced(model: Any) -> None:
    model.set_reduce_scatter_unused_params(True)


FSDP2: dict[str, Option] = {
    "plain": Option(shard=by_block),
    "one unit": Option(shard=in_one_unit),
    "force_sum_reduction": Option(
        shard=by_block, configure=SUMS, sums=True, divides=lambda ranks: ranks
    ),
    "divide factor 3, force_sum": Option(
        shard=by_block, configure=both(factor(3.0), SUMS), sums=True, divides=lambda ranks: 3
    ),
    "divide factor 7": Option(
        shard=by_block,
        configure=factor(7.0),
        refused="only SUM and AVG can be compressed; with a gradient divide factor, also call "
        "set_force_sum_reduction_for_comms(True)",
        refused_dense="Cannot use ReduceOp.PREMUL_SUM with Gloo",
    ),
    "gradient_sync off": Option(shard=by_block, backward=unsynced),
    "accumulation with sync": Option(shard=by_block, backward=synced),
    "is_last_backward": Option(shard=by_block, backward=last_flagged),
    "clip_grad_norm_": Option(shard=by_block, after=clip),
    "reshard_after_forward=False": Option(shard=partial(by_block, reshard_after_forward=False)),
    "reshard_after_forward=2": Option(shard=partial(by_block, reshard_after_forward=2), ranks=(4,)),
    "reshard_after_backward=False": Option(shard=by_block, backward=unsharded_between),
    "some parameters frozen": Option(prepare=freeze_some, shard=by_block),
    "a unit frozen": Option(prepare=freeze_a_unit, shard=by_block),
    "unused parameters": Option(net={"extra": True}, shard=by_block),
    "reduce_scatter_unused_params": Option(
        net={"extra": True}, shard=by_block, configure=unused_reduced
    ),
    "unused on odd ranks": Option(
        net={"extra": True}, shard=by_block, configure=unused_reduced, backward=on_even_ranks
    ),
    "tied weights": Option(net={"tied": True}, shard=by_block),
    "checkpoint inside": Option(net={"recompute": True}, shard=by_block),
    "checkpoint_wrapper": Option(prepare=wrap_blocks, shard=by_block),
    "compiled blocks": Option(prepare=compile_blocks, shard=by_block, ranks=(2, 3)),
    "CPU offload": Option(
        shard=partial(by_block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    "sharded by columns": Option(shard=by_columns),
    "blocks in one group": Option(shard=blocks_together, ranks=(3,)),
    "explicit prefetch": Option(shard=by_block, configure=explicit_prefetch),
    "units called twice": Option(net={"times": 2}, shard=by_block),
    "several parameter groups": Option(shard=in_two_meshes, backward=alike_in_pairs, ranks=(4,)),
    "hybrid mesh": Option(shard=in_hybrid_mesh, backward=not_replicated, ranks=(4,)),
    "tensor parallel blocks": Option(
        prepare=split_blocks, shard=in_data_mesh, backward=alike_in_pairs, ranks=(4,)
    ),
    "saved and resumed": Option(shard=by_block, resumes=True),
    "tensor parallel blocks, resumed": Option(
        prepare=split_blocks, shard=in_data_mesh, backward=alike_in_pairs, resumes=True, ranks=(4,)
    ),
    "loss in chunks": Option(shard=ends_together, backward=backward_in_chunks),
    "frozen after wrap": Option(shard=by_block, backward=freezing_later),
    "an all-gather of their own": Option(
        prepare=lambda model: gather_themselves(model.blocks), shard=by_block
    ),
    "hybrid mesh, loss in chunks": Option(
        shard=ends_together_in_hybrid_mesh, backward=backward_in_chunks, ranks=(4,)
    ),
}
REPLICAS: dict[str, Option] = {
    **some(
        FSDP2,
        "plain; force_sum_reduction; gradient_sync off; accumulation with sync; clip_grad_norm_; "
        "some parameters frozen; tied weights; reshard_after_forward=False; CPU offload; "
        "loss in chunks",
    ),
    "requires_all_reduce off": Option(shard=by_block, backward=not_replicated),
    "requires_all_reduce off, sums": replace(FSDP2["force_sum_reduction"], backward=not_replicated),
}
# On hosts of two ranks.
HOSTS: dict[str, Option] = {
    **some(
        FSDP2,
        "plain; one unit; force_sum_reduction; divide factor 3, force_sum; divide factor 7; "
        "gradient_sync off; accumulation with sync; some parameters frozen; a unit frozen; "
        "reduce_scatter_unused_params; loss in chunks; tied weights; checkpoint inside; "
        "CPU offload; sharded by columns; an all-gather of their own",
        ranks=(4,),
    ),
    **some(REPLICAS, "requires_all_reduce off; requires_all_reduce off, sums", ranks=(4,)),
    "three hosts": Option(shard=by_block, ranks=(6,)),
}
REPLICATED: dict[str, Option] = {
    **some(
        FSDP2,
        "plain; force_sum_reduction; divide factor 3, force_sum; gradient_sync off; "
        "accumulation with sync; is_last_backward; clip_grad_norm_; some parameters frozen; "
        "a unit frozen; unused parameters; reduce_scatter_unused_params; unused on odd ranks; "
        "tied weights; checkpoint inside; explicit prefetch; units called twice; "
        "saved and resumed; frozen after wrap",
        shard=replicated,
    ),
    "one unit": Option(shard=lambda model, **options: replicate(model, **options)),
    # Divided before the sum.
    "divide factor 7": Option(shard=replicated, configure=factor(7.0), sums=True),
    "requires_all_reduce off": Option(shard=replicated, backward=not_replicated),
    "CPU offload": Option(
        shard=partial(replicated, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ),
    **some(
        FSDP2,
        "tensor parallel blocks; tensor parallel blocks, resumed",
        shard=replicated_in_data_mesh,
    ),
}
