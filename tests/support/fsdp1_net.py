"""The small model sharded by FSDP1, and its flat buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from support.small_net import net

FSDP = FullyShardedDataParallel
CPU = torch.device("cpu")

# In the order of FSDP1's flat parameters: only what no inner unit has.
UNITS = {
    "": ("norm.weight", "norm.bias", "head.weight", "head.bias"),
    "first": ("first.0.weight", "first.0.bias"),
    "first.2": ("first.2.weight", "first.2.bias"),
    "second": ("second.0.weight", "second.0.bias", "second.2.weight", "second.2.bias"),
}


def nested(wrapped: Callable[[nn.Module], Any]) -> Any:
    """`Net` in nested units: a layer in a block in the root."""
    model: Any = net()
    model.first[2] = wrapped(model.first[2])
    model.first = wrapped(model.first)
    model.second = wrapped(model.second)
    return wrapped(model)


def sharded(**options: Any) -> Any:
    return nested(functools.partial(FSDP, device_id=CPU, **options))


def owners_in(unit: str, world_size: int) -> list[str]:
    """Which parameter has each element of FSDP1's buffer ``[W * S]``; none has the padding."""
    sizes = {name: p.numel() for name, p in net().named_parameters()}
    owners = [name for name in UNITS[unit] for _ in range(sizes[name])]
    return owners + [""] * (-len(owners) % world_size)
