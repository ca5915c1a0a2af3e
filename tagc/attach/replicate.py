"""``replicate``: whole parameters on FSDP2's machinery, whose all-reduce tagc replaces.

FSDP2 copies a unit's gradients into a buffer, and calls ``torch.distributed.all_reduce`` on it. It
adds up micro-batches with ``set_requires_gradient_sync(False)`` itself, and gathers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tagc.attach.averaging import all_reduces_by_class
from tagc.attach.fsdp2 import (
    FSDP2Unit,
    check_reduction,
    find_units,
    is_replicated,
    parallel_of,
    param_groups_of,
    reduce_dtype,
    unit_name,
    unit_param,
)
from tagc.attach.grad_mode import GradMode
from tagc.attach.tensor_parallel import ParallelDim
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


def _unit(
    name: str,
    module: nn.Module,
    group: Any,
    names: dict[int, str],
    grad_mode: GradMode,
    is_topmost: bool,
    parallel: Sequence[ParallelDim],
) -> ReplicatedUnit:
    name = unit_name(name, module, group)
    if not all_reduces_by_class():
        raise ValueError(
            f"{name or 'the root module'!r} is replicated by replicate(), and tagc cannot replace "
            "the all-reduce of this version of torch; use DistributedDataParallel"
        )
    check_reduction(name, group)
    planned = {id(p): unit_param(p, group, names, parallel) for p in group.fsdp_params}
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    return ReplicatedUnit(
        info=UnitInfo(
            name=name,
            params=tuple(planned[id(p)] for p in trainable),
            world_size=group.mesh_info.replicate_mesh_size,
            dtype=reduce_dtype(name, group),
            replicated=True,
        ),
        group=group.mesh_info.replicate_process_group,
        device=group.device,
        parallel=[dim.group for p in group.fsdp_params for dim in parallel_of(p, group)],
        _param_group=group,
        _names={key: param.name for key, param in planned.items()},
        _grad_mode=grad_mode,
        _native=(group._reduce_scatter_comm, group._all_gather_comm, group._all_reduce_hook),
    )


def _modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_replicated(module)]


REPLICATE = Integration(
    name="replicate",
    spelled="replicate (torch.distributed._composable.replicate_with_fsdp)",
    shards=lambda model: bool(_modules(model)),
    sharding_groups=lambda model: [
        group.mesh_info.replicate_process_group
        for module in _modules(model)
        for group in param_groups_of(module)
    ],
    find_units=lambda model: find_units(model, _unit),
    check_policy=check_policy,
)
