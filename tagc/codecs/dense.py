"""The ``dense`` codec: columns travel as they are, through the backend's reduce-scatter."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from tagc.exchange import Pending, dense_reduce_scatter
from tagc.plan import UnitPlan
from tagc.workspace import Workspace


class DenseColumns:
    """The dense columns of a unit that also has compressed ones, packed into one message."""

    def __init__(self, plan: UnitPlan, workspace: Workspace) -> None:
        self._segments = plan.dense
        self._columns = sum(s.columns for s in self._segments)
        self._world_size = plan.info.world_size
        self._workspace = workspace
        self._received: Tensor | None = None
        self._pending: Pending | None = None
        self.wire_bytes = 0

    def start(self, grad: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
        """Start reducing the dense columns of ``grad`` ``[W, S]``."""
        if not self._columns:
            return
        shape = (self._world_size, self._columns)
        packed = self._workspace.take("dense_send", shape, grad.dtype)
        at = 0
        for s in self._segments:
            packed[:, at : at + s.columns].copy_(grad[:, s.start : s.stop])
            at += s.columns
        self._received = self._workspace.take("dense_recv", (self._columns,), grad.dtype)
        self._pending = dense_reduce_scatter(self._received, packed.view(-1), group, op)
        self.wire_bytes += self._pending.wire_bytes

    def finish(self, out: Tensor) -> None:
        """Write the reduced columns to their place in ``out`` ``[S]``."""
        if self._pending is None or self._received is None:
            return
        self._pending.wait()
        self._pending = None
        at = 0
        for s in self._segments:
            out[s.start : s.stop].copy_(self._received[at : at + s.columns])
            at += s.columns
