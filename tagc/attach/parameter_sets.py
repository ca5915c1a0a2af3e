"""Units of a model that each rank holds whole: fixed sets of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from tagc.plan import UnitInfo, UnitParam

Named = tuple[str, nn.Parameter]


def parameter_sets(named: Iterable[Named], limit: int) -> list[list[Named]]:
    """Trainable parameters that have elements, in their own order, at most ``limit`` bytes of one
    dtype and device in a set, unless a single parameter has more."""
    found: list[list[Named]] = []
    # The last set of each dtype and device, which may have room for more.
    last: dict[tuple[torch.dtype, torch.device], list[Named]] = {}
    for name, param in named:
        if not param.requires_grad or not param.numel():
            continue
        kind = param.dtype, param.device
        if kind not in last or _bytes([*last[kind], (name, param)]) > limit:
            last[kind] = []
            found.append(last[kind])
        last[kind].append((name, param))
    return found


def info_of_set(named: Sequence[Named], world_size: int) -> UnitInfo:
    """The all-reduce of a set, named after its first parameter."""
    infos = [
        UnitParam(name=name, shape=tuple(param.shape) or (1,), columns=param.numel())
        for name, param in named
    ]
    return UnitInfo(
        name=named[0][0],
        params=tuple(infos),
        world_size=world_size,
        dtype=named[0][1].dtype,
        replicated=True,
    )


def columns_in_rows(shape: Sequence[int], rows: int) -> int:
    """Columns of a parameter that is cut in its first dimension into ``rows`` rows, as FSDP2 would
    shard it."""
    length, *rest = shape or (1,)
    return -(-length // rows) * math.prod(rest)


def _bytes(named: Sequence[Named]) -> int:
    return sum(param.numel() * param.element_size() for _, param in named)
