"""Gradients across replicas: one unit's average over the ranks that hold the same shard."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.comm.reducer import UnitReducer


class ReplicaAverage:
    """FSDP's all-reduce hook for one unit.

    It runs after every reduce-scatter. In a backward that the replicas do not share
    (``set_requires_all_reduce(False)``) the shard's gradient waits here, and FSDP adds zeros to
    ``.grad`` instead; with the next one that they share, all of it is averaged at once, as in
    FSDP's own hybrid sharding.
    """

    def __init__(
        self, reducer: UnitReducer, group: dist.ProcessGroup, shared: Callable[[], bool]
    ) -> None:
        """New state.

        Args:
            shared: whether the replicas share the gradient of this backward; the same on all ranks.
        """
        self._reducer, self._group, self._shared = reducer, group, shared
        self._waiting: Tensor | None = None

    @torch.no_grad()
    def __call__(self, shard: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG) -> None:
        """Replace ``shard`` ``[S]`` by the average over the replicas, or by zeros.

        Args:
            op: AVG, or SUM for their sum.
        """
        if shard.is_cuda:
            # FSDP allocated it in another stream, and lets go of it while this one still works.
            shard.record_stream(torch.cuda.current_stream(shard.device))
        if self._waiting is not None:
            shard.add_(self._waiting)
            self._waiting = None
        if self._shared():
            # What owners owe is in units of the average, whatever the operation.
            scaled = op == dist.ReduceOp.SUM and self._reducer.second is not None
            self._reducer.reduce(shard, shard, self._group, dist.ReduceOp.AVG if scaled else op)
            if scaled:
                shard.mul_(self._group.size())
        else:
            self._waiting = shard.clone()
            shard.zero_()
