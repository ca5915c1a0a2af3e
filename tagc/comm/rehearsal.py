"""A step of a unit without ranks and without memory: which operators it calls, and with what.

Tensors are of device ``meta``: they have shapes, strides and an alignment, but nothing in them. So
whatever depends on those can be found out, and compiled, before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.comm.collectives import CollectiveWork
from tagc.comm.gatherer import GatherSetup, gather_coder
from tagc.comm.host_copy import HostCopy
from tagc.comm.reducer import UnitReducer
from tagc.ops import Ops
from tagc.plan import Plan, UnitPlan

_META = torch.device("meta")
# The first step has its own way of choosing thresholds.
_STEPS = 2


def rehearse(plan: Plan, ops: Ops) -> None:
    """Call the operators of ``ops`` as the steps of a model will, on ``meta`` tensors.

    Args:
        ops: must write nothing, as :meth:`tagc.ops.implementations.DeviceOps.compiling_only` does.
    """
    workspace = Workspace(_META)
    for unit in (*plan.units, *plan.replicas):
        if unit.compressed:
            _rehearse_reduction(unit, ops, workspace)
    for unit in plan.parameters:
        if unit.compressed:
            _rehearse_gather(unit, ops, workspace)


def _rehearse_reduction(unit: UnitPlan, ops: Ops, workspace: Workspace) -> None:
    reducer = UnitReducer(unit, ops, _META, workspace, seed=0)
    plan, second = unit.stages[0], reducer.second
    send, received = _messages(plan)
    grad = torch.empty(plan.destinations, plan.columns, dtype=plan.info.dtype, device=_META)
    shard = torch.empty(unit.columns, dtype=plan.info.dtype, device=_META)
    out = shard if second is None else second.slice_sum()
    exchange = _NoExchange(workspace, plan.sources)
    if unit.inside is not None:
        rows, words = unit.info.world_size, unit.inside.row_words
        own = torch.empty(rows, plan.columns, dtype=plan.info.dtype, device=_META)
        messages = torch.empty(rows, words, dtype=torch.int32, device=_META)
        inside = reducer.inside.coder
        assert inside is not None
        inside.encode_rows(own, messages)
        inside.decode_sums(messages.view(unit.peers, -1, words), grad)
    for _ in range(_STEPS):
        reducer.coder.encode(grad, send, exchange)
        reducer.coder.start(exchange)
        reducer.coder.wait()
        reducer.coder.decode(received, out, exchange, plan.info.world_size)
        if second is not None:
            message, messages = _messages(second.plan)
            second.encode(out, message)
            second.decode(messages, shard)


def _messages(plan: UnitPlan) -> tuple[Tensor, Tensor]:
    """Those that a rank makes, and those that it gets."""
    rows = plan.destinations, plan.sources
    made, got = (torch.empty(n, plan.row_words, dtype=torch.int32, device=_META) for n in rows)
    return made, got


def _rehearse_gather(plan: UnitPlan, ops: Ops, workspace: Workspace) -> None:
    setup = GatherSetup(plan=plan, ops=ops, device=_META, workspace=workspace)
    shard = torch.empty(plan.columns, dtype=plan.info.dtype, device=_META)
    message, received = _messages(plan)
    if plan.keeps_copy:
        copy = HostCopy(setup, own=0)
        copy.encode(shard, message)
        copy.decode(received, copy.rows)
        return
    coder = gather_coder(setup)
    rows = torch.empty(plan.sources, plan.columns, dtype=plan.info.dtype, device=_META)
    coder.encode_rows(shard[None], message)
    coder.decode_rows(received, rows)


class _NoExchange:
    """Stands for an exchange with ``ranks`` ranks; nothing is sent. See
    :class:`tagc.codecs.Exchange`."""

    def __init__(self, workspace: Workspace, ranks: int) -> None:
        self.row = self.wire_bytes = 0
        self.takes_leftovers = True
        self._workspace, self._ranks = workspace, ranks

    def add_inside(self, grad: Tensor) -> Tensor:
        return grad

    def send(self, received: Tensor, message: Tensor) -> CollectiveWork:
        return CollectiveWork((), 0)

    def sum_cells(self, cells: Tensor) -> tuple[CollectiveWork, Tensor]:
        total = self._workspace.take("cells_sum", (cells.shape[1],), cells.dtype)
        return CollectiveWork((), 0), total

    def sum_counts(self, counts: Tensor) -> CollectiveWork:
        return CollectiveWork((), 0)

    def gather(self, values: Tensor) -> Tensor:
        return values.expand(self._ranks, *values.shape)
