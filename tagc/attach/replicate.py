"""``replicate``: whole parameters on FSDP2's machinery, whose all-reduce tagc replaces.

FSDP2 copies a unit's gradients into a buffer, and calls ``torch.distributed.all_reduce`` on it. It
adds up micro-batches with ``set_requires_gradient_sync(False)`` itself, and gathers nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tagc.attach.fsdp2 import FoundGroup, FSDP2Unit, find_units, is_replicated, param_groups_of
from tagc.attach.fsdp2_collectives import all_reduces_by_class
from tagc.attach.unit import Integration
from tagc.attach.whole import check_policy, reduce_whole, whole_on_hosts
from tagc.collect import CollectiveWork, Transport, UnitReducer
from tagc.plan import UnitInfo


@dataclass(frozen=True, kw_only=True)
class ReplicatedUnit(FSDP2Unit):
    """One communication unit of a model that ``replicate`` was applied to."""

    def install(self, reducer: UnitReducer) -> None:
        super().install(reducer)
        self._param_group._reduce_scatter_comm.average = partial(self._average, reducer)

    def on_hosts(self, ranks: int) -> UnitInfo:
        return whole_on_hosts(self.info, ranks)

    def _average(self, reducer: UnitReducer, buffer: Tensor, op: Any) -> None:
        reached = self.reached
        if reducer.plan.rows == 1:  # the buffer is what is sent
            reducer.reduce(buffer, buffer, self.group, op, _natively, reached=reached)
            return
        params = [p for p in self.info.params if reached is None or p.name in reached]
        shapes = [p.local_shape for p in params]
        pieces = buffer.split([math.prod(shape) for shape in shapes])
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        reduce_whole(reducer, views, self.group, op, _natively, reached=reached)


def _natively(
    out: Tensor, inp: Tensor, transport: Transport, op: dist.ReduceOp.RedOpType
) -> CollectiveWork:
    """As FSDP2 does it, in place."""
    return transport.all_reduce(out, op)


def _unit(found: FoundGroup) -> ReplicatedUnit:
    if not all_reduces_by_class():
        raise ValueError(
            f"{found.name or 'the root module'!r} is replicated by replicate(), and tagc cannot "
            "replace the all-reduce of this version of torch; use DistributedDataParallel"
        )
    mesh = found.group.mesh_info
    return ReplicatedUnit(
        info=found.reduction(mesh.replicate_mesh_size, replicated=True),
        group=mesh.replicate_process_group,
        **found.fields,
    )


def _groups(model: nn.Module) -> list[dist.ProcessGroup]:
    modules = [module for module in model.modules() if is_replicated(module)]
    found = [group for module in modules for group in param_groups_of(module)]
    return [group.mesh_info.replicate_process_group for group in found]


REPLICATE = Integration(
    name="replicate",
    description="replicate (torch.distributed._composable.replicate_with_fsdp)",
    shards=lambda model: any(map(is_replicated, model.modules())),
    sharding_groups=_groups,
    find_units=lambda model: find_units(model, _unit),
    check_policy=check_policy,
)
