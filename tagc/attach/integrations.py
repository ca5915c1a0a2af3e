"""All integrations, and the one that shards a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn

from tagc.attach.ddp import DDP
from tagc.attach.fsdp1 import FSDP1
from tagc.attach.fsdp2 import FSDP2, REPLICATE
from tagc.attach.unit import Integration

INTEGRATIONS: tuple[Integration, ...] = (DDP, FSDP1, FSDP2, REPLICATE)


def sharding_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of ranks that share a model, even an invalid one; none if it is not sharded."""
    return distinct(group for i in INTEGRATIONS for group in i.sharding_groups(model))


def distinct(groups: Iterable[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    """The groups in their order, each once."""
    return list({id(group): group for group in groups}.values())


def integration_of(model: nn.Module) -> Integration:
    """The integration that shards a model.

    Raises:
        ValueError: if none or several do.
    """
    found = [integration for integration in INTEGRATIONS if integration.shards(model)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", partly by ".join(i.description for i in found)
        raise ValueError(f"the model is sharded partly by {names}; use fully_shard for all of it")
    for name, module in model.named_modules():
        # `replicate` gives the module its own class, a subclass of one that torch does not export.
        marks = ((base.__module__, base.__name__) for base in type(module).__mro__)
        if ("torch.distributed._composable.replicate", "DDP") in marks:
            raise ValueError(
                f"{name or 'the model'!r} is data parallel by replicate(), whose hooks tagc cannot "
                "reach; use torch.nn.parallel.DistributedDataParallel instead"
            )
    raise ValueError(
        f"{type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on its "
        "blocks and on itself first, or make it a DistributedDataParallel, then tagc.wrap"
    )
