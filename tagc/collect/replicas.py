"""Averages one unit's gradients over replicas: the ranks that hold the same shard."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.collect.reducer import UnitReducer
from tagc.ops.torch_operators import Expand, Pick
from tagc.plan.part import Part


class ReplicaAverage:
    """FSDP's all-reduce hook for one unit.

    It runs after every reduce-scatter. If the replicas do not share a backward
    (``set_requires_all_reduce(False)``), the shard's gradient waits here, and FSDP adds zeros to
    ``.grad`` instead. The next shared backward averages the whole sum at once, as FSDP's own hybrid
    sharding does.
    """

    def __init__(
        self,
        reducer: UnitReducer,
        group: dist.ProcessGroup,
        shared: Callable[[], bool],
        reached: Callable[[], Set[str] | None] = lambda: None,
    ) -> None:
        """
        Args:
            shared: whether the replicas share the gradient of this backward, as all ranks know.
            reached: see :meth:`UnitReducer.reduce`.
        """
        self._reducer, self._group, self._shared = reducer, group, shared
        self._reached, self._waiting = reached, reducer.waiting

    @torch.no_grad()
    def __call__(self, shard: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.AVG) -> None:
        """Replace ``shard`` ``[S]`` by the average (or sum) over the replicas, or by zeros if it
        waits."""
        if shard.is_cuda:
            # FSDP allocated it on another stream, and frees it while this stream still uses it.
            shard.record_stream(torch.cuda.current_stream(shard.device))
        names = self._reached()
        part = None if names is None else Part(self._reducer.plan, frozenset(names))
        self._reducer.check_capture(waits=not self._shared())
        if not self._shared():
            self._waiting.add(self._whole(shard, part), part)
            shard.zero_()
            return
        if self._waiting:
            whole = self._whole(shard, part)
            self._waiting.hand_over(whole, part)
            if part is not None:
                Pick(part.runs).run(whole[None], shard[None])
        # Owners' residuals are in units of the average for both operations.
        scaled = op == dist.ReduceOp.SUM and self._reducer.plan.shots is not None
        mean = dist.ReduceOp.AVG if scaled else op
        self._reducer.reduce(shard, shard, self._group, mean, reached=names)
        if scaled:
            shard.mul_(self._group.size())

    def _whole(self, shard: Tensor, part: Part | None) -> Tensor:
        """The shard in all columns of the plan; the others are zero."""
        if part is None:
            return shard
        whole = shard.new_empty(self._reducer.plan.columns)
        Expand(part.runs).run(shard[None], whole[None])
        return whole
