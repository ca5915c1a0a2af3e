"""Parameters that every rank has whole, with DDP, ``replicate`` and in sites: how they are put into
units, how their gradients are reduced, and what a policy may ask for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tagc.collect import UnitReducer
from tagc.collect.reducer import ReduceNatively
from tagc.plan import UnitInfo, UnitParam
from tagc.policy import Policy, PolicyError

Named = tuple[str, nn.Parameter]


def parameter_sets(named: Iterable[Named], limit: int) -> list[list[Named]]:
    """Trainable parameters that have elements, in their own order, at most ``limit`` bytes of one
    dtype and device in a set, unless a single parameter has more."""
    found: list[list[Named]] = []
    # The last set of each dtype and device, which may have room for more, and its bytes.
    last: dict[tuple[torch.dtype, torch.device], tuple[list[Named], int]] = {}
    for name, param in named:
        if not param.requires_grad or not param.numel():
            continue
        kind, size = (param.dtype, param.device), param.numel() * param.element_size()
        members, total = last.get(kind, ([], limit))
        if total + size > limit:
            members, total = [], 0
            found.append(members)
        members.append((name, param))
        last[kind] = members, total + size
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


def whole_on_hosts(info: UnitInfo, ranks: int) -> UnitInfo:
    """The unit with ``ranks`` neighbours on each host, over which its parameters are cut."""
    params = [replace(p, columns=columns_in_rows(p.local_shape, ranks)) for p in info.params]
    return replace(info, params=tuple(params), ranks_per_host=ranks)


def reduce_whole(
    reducer: UnitReducer,
    views: Sequence[Tensor],
    group: dist.ProcessGroup,
    op: Any,
    native: ReduceNatively,
    *,
    reached: Set[str] | None,
) -> None:
    """Replace gradients by their sum or average over all ranks.

    Args:
        views: whole gradients of a unit's parameters, in its order.
        reached: their names if they are not all of the unit's.
    """
    # As FSDP2 would shard them over the ranks of a host: a row for each, which it adds up.
    rows = reducer.plan.rows
    views = [view for view in views if view.numel()]
    if not views:
        return
    whole = [view.reshape(-1) if rows == 1 or not view.ndim else view for view in views]
    flat = torch._chunk_cat(whole, dim=0, num_chunks=rows).view(-1)
    reducer.reduce(flat, flat, group, op, native, reached=reached)
    pieces = flat.view(rows, -1).split([columns_in_rows(view.shape, rows) for view in views], dim=1)
    pairs = zip(pieces, views, strict=True)
    found = [piece.reshape(-1)[: view.numel()].view_as(view) for piece, view in pairs]
    torch._foreach_copy_(list(views), found)


def check_policy(policy: Policy, replicas: bool) -> None:
    """Refuse rules for replicas, and averaging over them."""
    if policy.replicas or replicas:
        raise PolicyError(
            f"policy {policy.name!r}: with DDP and replicate() all ranks are replicas, and rules "
            "for gradients compress their all-reduce: leave out rules for replicas, and "
            "replicas=..."
        )
