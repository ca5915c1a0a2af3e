"""All integrations, and the one that shards a model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tagc.attach.fsdp1 import FSDP1
from tagc.attach.fsdp2 import FSDP2
from tagc.attach.unit import Integration

INTEGRATIONS: tuple[Integration, ...] = (FSDP1, FSDP2)


def sharding_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The groups of ranks that share a model, even an invalid one; none if it is not sharded."""
    groups = [group for i in INTEGRATIONS for group in i.sharding_groups(model)]
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
        raise ValueError(
            f"the model is sharded partly by {', partly by '.join(i.spelled for i in found)}; use "
            "fully_shard for all of it"
        )
    for name, module in model.named_modules():
        if (how := _data_parallel(module)) is not None:
            raise ValueError(
                f"{name or 'the model'!r} is data parallel by {how} (DDP), which all-reduces whole "
                "gradients; tagc compresses FSDP's reduce-scatter. Leave DDP out, and call "
                "torch.distributed.fsdp.fully_shard on the blocks and on the model before tagc.wrap"
            )
    raise ValueError(
        f"{type(model).__name__} is not sharded: call torch.distributed.fsdp.fully_shard on its "
        "blocks and on itself first, then tagc.wrap"
    )


def _data_parallel(module: nn.Module) -> str | None:
    """The name of what made a module data parallel without sharding it; None if nothing did."""
    if isinstance(module, DistributedDataParallel):
        return "DistributedDataParallel"
    # `replicate` gives the module its own class, a subclass of one that torch does not export.
    marks = ((base.__module__, base.__name__) for base in type(module).__mro__)
    return "replicate()" if ("torch.distributed._composable.replicate", "DDP") in marks else None
