"""Gradients that every rank has whole, with DDP and ``replicate``: how they are reduced, and what a
policy may ask for."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.attach.parameter_sets import columns_in_rows
from tagc.collect import UnitReducer
from tagc.collect.reducer import ReduceNatively
from tagc.plan import UnitInfo
from tagc.policy import Policy, PolicyError
from tagc.policy.rules import check_lead


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


def whole_on_hosts(info: UnitInfo, ranks: int) -> UnitInfo:
    """The unit with ``ranks`` neighbours on each host, over which its parameters are cut."""
    params = [replace(p, columns=columns_in_rows(p.local_shape, ranks)) for p in info.params]
    return replace(info, params=tuple(params), ranks_per_host=ranks)


def check_policy(policy: Policy, replicas: bool) -> None:
    """Refuse what no integration that replicates can do.

    Args:
        replicas: whether gradients are to be averaged over replicas of the model.

    Raises:
        PolicyError: if the policy has rules for replicas, or a lead that ranks measure, or
            ``replicas`` is true.
    """
    if policy.replicas or replicas:
        raise PolicyError(
            f"policy {policy.name!r}: with DDP and replicate() all ranks are replicas, and rules "
            "for gradients compress their all-reduce: leave out rules for replicas, and "
            "replicas=..."
        )
    for i, rule in enumerate(policy.gradients):
        try:
            check_lead(rule)
        except ValueError as error:
            raise PolicyError(
                f"policy {policy.name!r}, gradients[{i}], with DDP or replicate(): {error}"
            ) from None
