"""Runs a unit's steps without other ranks and without memory, to show which operators it calls.

Tensors are on device ``meta``: they have shapes, strides and alignment, but no contents. That is
enough to compile all kernels of a step before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tagc.codecs.workspace import Workspace
from tagc.collect.copy_gatherer import CopyGatherer
from tagc.collect.gatherer import GatherSetup, MessageGatherer, Phase
from tagc.collect.hosts import HostGroups
from tagc.collect.reducer import UnitReducer
from tagc.collect.transport import SilentGroup, SilentTransport
from tagc.ops import Ops
from tagc.plan import Plan, UnitPlan

_META = torch.device("meta")
# The first step chooses thresholds differently.
_STEPS = 2


def rehearse(plan: Plan, ops: Ops) -> None:
    """Call the operators of ``ops`` as the steps of a model will, on ``meta`` tensors.

    Args:
        ops: operators that write nothing, such as those of
            :meth:`tagc.ops.implementations.DeviceOps.compiling_only`.
    """
    workspace = Workspace(_META)
    for unit in (*plan.units, *plan.replicas):
        if unit.compressed:
            _rehearse_reductions(unit, ops, workspace)
    for unit in plan.parameters:
        if unit.compressed:
            _rehearse_gathers(unit, ops, workspace)


def _rehearse_reductions(unit: UnitPlan, ops: Ops, workspace: Workspace) -> None:
    """Reduce a unit's gradients as it does after its warm-up."""
    reducer = UnitReducer(
        unit, ops, _META, workspace, seed=0, hosts=_hosts(unit), connect=SilentTransport
    )
    reducer.counters.earlier_steps = unit.warmup_steps
    out = torch.empty(unit.received_rows * unit.buffer_columns, dtype=unit.info.dtype, device=_META)
    for _ in range(_STEPS):
        inp = torch.empty(unit.rows * unit.buffer_columns, dtype=unit.info.dtype, device=_META)
        reducer.reduce(out, inp, _group(unit.info.world_size), dist.ReduceOp.AVG)


def _rehearse_gathers(unit: UnitPlan, ops: Ops, workspace: Workspace) -> None:
    """Gather a unit's parameters as its steps do, including a later forward from a copy."""
    setup = GatherSetup(
        plan=unit,
        ops=ops,
        device=_META,
        workspace=workspace,
        hosts=_hosts(unit),
        connect=SilentTransport,
    )
    group, info = _group(unit.info.world_size), unit.info
    out = torch.empty(info.world_size * unit.columns, dtype=info.dtype, device=_META)
    shard = out[: unit.columns]
    if not unit.keeps_copy:
        gatherer = MessageGatherer(setup)
        # A rank's shard is its row of FSDP's output, so the rank decides whether it is aligned. One
        # rank of a host compiles for all of them.
        for rank in range(min(2, info.world_size)):
            shard = out[rank * unit.columns : (rank + 1) * unit.columns]
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                gatherer.gather(out, shard, group, phase)
        return
    copies = CopyGatherer(setup, reductions=lambda: 0, versions=lambda: 0)
    for _ in range(2):  # the first gather sends shards uncompressed
        copies.gather(out, shard, group, Phase.FORWARD)
        copies.note_step(ended=True)


def _hosts(unit: UnitPlan) -> HostGroups | None:
    ranks = unit.info.ranks_per_host
    if ranks == 1:
        return None
    return HostGroups(inside=_group(ranks), across=_group(unit.peers), _key=())


def _group(size: int) -> Any:
    return SilentGroup(size)
