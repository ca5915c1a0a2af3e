"""One unit's compressed reduce-scatter, from FSDP's buffer to this rank's shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs.dense import DenseColumns
from tagc.codecs.sketch import SketchColumns
from tagc.exchange import dense_reduce_scatter
from tagc.fsdp2 import unused_parameters_remedy
from tagc.ops import Ops
from tagc.plan import UnitPlan
from tagc.workspace import Workspace


class UnitReducer:
    """Reduces the gradient buffer of one FSDP unit as its plan says.

    Attributes:
        plan: segments of the unit.
        sketch: state of the sketched columns.
        steps: reductions so far.
        sketch_steps: those after the warm-up.
    """

    def __init__(
        self, plan: UnitPlan, ops: Ops, device: torch.device, workspace: Workspace, seed: int
    ) -> None:
        self.plan = plan
        self.sketch = SketchColumns(plan, ops, device, workspace, seed)
        self.dense = DenseColumns(plan, workspace)
        self.steps = 0
        self.sketch_steps = 0
        self._native_bytes = 0
        self._name = plan.info.name or "(root)"

    @property
    def wire_bytes(self) -> int:
        """Bytes sent so far, all columns."""
        return self._native_bytes + self.dense.wire_bytes + self.sketch.wire_bytes

    @property
    def compressed_wire_bytes(self) -> int:
        """Bytes sent so far for the columns that the policy compresses, warm-up included."""
        columns = sum(s.columns for s in self.plan.sketched)
        warmup = self._native_bytes * columns // self.plan.columns if columns else 0
        return warmup + self.sketch.wire_bytes

    def reduce(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
    ) -> None:
        """Write this rank's shard of the sum or average of all ranks' ``inp`` to ``out``.

        Args:
            out: ``[S]``.
            inp: ``[W * S]``, row ``d`` for rank ``d``.
            op: SUM or AVG; any, if the unit has nothing to compress.

        Raises:
            RuntimeError: if buffer, group or operation are not what the plan was made for, before
                anything is sent.
        """
        W = self.plan.info.world_size
        if self.plan.sketched:
            self._check(out, inp, group, op)
        self.steps += 1
        if not self.plan.sketched or self.steps <= self.plan.warmup_steps:
            pending = dense_reduce_scatter(out, inp, group, op)
            self._native_bytes += pending.wire_bytes
            pending.wait()
            return
        self.sketch_steps += 1
        grad = inp.view(W, -1)
        with record_function(f"TAGC::encode ({self._name})"):
            self.sketch.encode(grad, group)
        with record_function(f"TAGC::exchange ({self._name})"):
            self.sketch.start(group)
            self.dense.start(grad, group, op)
            self.sketch.wait()
        with record_function(f"TAGC::decode ({self._name})"):
            self.sketch.decode(out, group.rank(), W if op == dist.ReduceOp.AVG else 1)
            self.dense.finish(out)

    def _check(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
    ) -> None:
        info = self.plan.info
        columns = self.plan.columns
        if group.size() != info.world_size:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned for {info.world_size} ranks, but FSDP "
                f"reduces over {group.size()}; call tagc.wrap after the model is sharded for good"
            )
        if out.numel() != columns or inp.numel() != columns * info.world_size:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned for {columns} gradient columns per rank, "
                f"but FSDP reduces {out.numel()}: some of its parameters got no gradient in this "
                "backward, or requires_grad changed after tagc.wrap. Freeze parameters before "
                f"tagc.wrap, and {unused_parameters_remedy()}"
            )
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RuntimeError(
                f"tagc: unit {self._name!r} is reduced with {op}, but only SUM and AVG can be "
                "compressed; with a gradient divide factor, also call "
                "set_force_sum_reduction_for_comms(True) on the FSDP modules"
            )
