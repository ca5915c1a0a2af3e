"""The communication units of a model, whichever FSDP sharded it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tagc import fsdp1, fsdp2
from tagc.fsdp1 import FSDP1Unit
from tagc.fsdp2 import FSDP2Unit

Unit = FSDP1Unit | FSDP2Unit


def sharding_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of ranks that share a model, whatever else may be wrong with it; none if it is
    not sharded."""
    groups = (*fsdp1.sharding_groups(model), *fsdp2.sharding_groups(model))
    return list({id(group): group for group in groups}.values())


def find_units(model: nn.Module) -> list[FSDP1Unit] | list[FSDP2Unit]:
    """The units of a model, in module order, with their trainable parameters.

    Raises:
        ValueError: if the model is not sharded, or in a way whose reduce-scatter cannot be
            replaced, or if a unit is already wrapped.
    """
    has_fsdp1 = any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
    has_fsdp2 = any(isinstance(m, FSDPModule) for m in model.modules())
    if has_fsdp1 and has_fsdp2:
        raise ValueError(
            "the model is sharded partly by FSDP1 (FullyShardedDataParallel), partly by FSDP2 "
            "(fully_shard); use fully_shard for all of it"
        )
    if has_fsdp1:
        return fsdp1.find_units(model)
    if has_fsdp2:
        return fsdp2.find_units(model)
    kind = type(model).__name__
    if kind == "DistributedDataParallel":
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which all-reduces whole gradients; "
            "tagc compresses FSDP's reduce-scatter: use torch.distributed.fsdp.fully_shard"
        )
    raise ValueError(
        f"{kind} is not sharded: call torch.distributed.fsdp.fully_shard on its blocks and on "
        "itself first, then tagc.wrap"
    )


def fsdp2_units(units: Sequence[Unit]) -> list[FSDP2Unit]:
    """Those units whose all-gather and all-reduce can be replaced, too: all, or none."""
    return [unit for unit in units if isinstance(unit, FSDP2Unit)]
