"""One unit's compressed reduction, from FSDP's buffer to this rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs import Columns, nested, part_of
from tagc.codecs.dense import DenseColumns
from tagc.codecs.packed import PackedColumns
from tagc.codecs.quantized import MatrixColumns, QuantizedColumns
from tagc.codecs.residual import Residual
from tagc.codecs.sketch import SketchColumns
from tagc.exchange import (
    Pending,
    all_reduce_sum,
    all_to_all,
    dense_reduce_scatter,
    failing_in,
    gather_messages,
)
from tagc.flat import flat_rows
from tagc.fsdp2 import unused_parameters_remedy
from tagc.ops import Ops
from tagc.plan import UnitPlan
from tagc.workspace import Workspace

Native = Callable[[Tensor, Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType], Pending]

_MOST = 2**59
_KINDS = ("sketch", "packed", "quantized", "matrix", "dense")
_COUNTERS = ("steps", "compressed_steps", "earlier_steps", "_native_bytes", "_message_bytes")


class UnitReducer:
    """Reduces the gradient buffer of one FSDP unit as its plan says.

    All columns travel in one message to each destination; sketches have their cells summed
    beside it. Without anything compressed, and during the warm-up, the backend's own collective
    runs on the whole buffer.

    Attributes:
        plan: segments of the unit.
        sketch, packed, quantized, matrix, dense: state of the columns, by codec.
        steps: reductions so far.
        compressed_steps: those after the warm-up.
        earlier_steps: reductions of the run that this one goes on from with another layout: they
            count for the warm-up, but not in the metrics.
    """

    def __init__(
        self, plan: UnitPlan, ops: Ops, device: torch.device, workspace: Workspace, seed: int
    ) -> None:
        self.plan = plan
        self._ops, self._device, self._workspace, self._seed = ops, device, workspace, seed
        self._name = plan.info.name or "(root)"
        self._flat = flat_rows(plan, workspace)
        # Whether the dense reductions of the warm-up change anything of what owners keep.
        kinds = [s.codec.feedback for s in plan.segments if s.codec.feedback is not None]
        self._follows = any(feedback.rate for feedback in kinds)
        self.reset()

    def reset(self, earlier_steps: int = 0) -> None:
        """Start anew, with empty residuals, after so many reductions elsewhere."""
        plan, ops, device = self.plan, self._ops, self._device
        self.sketch = SketchColumns(plan, ops, device, self._workspace, self._seed)
        self.packed = PackedColumns(plan, ops, device)
        self.quantized = QuantizedColumns(plan, ops, device)
        self.matrix = MatrixColumns(plan, ops, device)
        for columns in (self.quantized, self.matrix):
            columns.steps = max(0, earlier_steps - plan.warmup_steps)
        self.dense = DenseColumns(plan)
        self._columns: tuple[Columns, ...] = (
            self.sketch,
            self.packed,
            self.quantized,
            self.matrix,
            self.dense,
        )
        self.steps = 0
        self.compressed_steps = 0
        self.earlier_steps = earlier_steps
        self._native_bytes = 0
        self._message_bytes = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes sent so far, all columns."""
        beside = sum(columns.wire_bytes for columns in self._columns)
        return self._native_bytes + self._message_bytes + beside

    @property
    def compressed_wire_bytes(self) -> int:
        """Bytes sent so far for the columns that the policy compresses, warm-up included."""
        columns = sum(self.plan.dense_columns(s.params) for s in self.plan.compressed)
        if not columns:
            return 0
        words = sum(map(self.plan.sent_words, self.plan.compressed))
        return (
            int(self._native_bytes * columns // self.plan.buffer_columns)
            + int(self._message_bytes * words // sum(map(self.plan.sent_words, self.plan.segments)))
            + sum(c.wire_bytes for c in self._columns)
        )

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residual ``[D, columns]`` by first column of the segment in the unit, to look at."""
        return {start: residual.read() for start, residual in self._owed.items()}

    @property
    def kept(self) -> dict[int, Tensor]:
        """What this rank keeps as the owner of its shard, ``[1, columns]``, likewise: the moving
        average of the feedback kind ``momentum``, or the last sum of a lead. See
        :mod:`tagc.codecs.delivery`."""
        kinds = (self.sketch, self.packed, self.quantized, self.matrix)
        return {start: kept for columns in kinds for start, kept in columns.kept.items()}

    @contextmanager
    def opened(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`residuals` to be changed in place."""
        with ExitStack() as stack:
            yield {start: stack.enter_context(r.opened()) for start, r in self._owed.items()}

    @property
    def _owed(self) -> dict[int, Residual]:
        kinds = (self.sketch, self.packed, self.quantized, self.matrix)
        return {start: r for columns in kinds for start, r in columns.residuals.items()}

    def rescale(self, factor: float | Tensor) -> None:
        """Expect gradients that are ``factor`` times as large, the same on every rank."""
        with self.opened() as residuals:
            for stored in (*residuals.values(), *self.kept.values()):
                stored.mul_(factor)
        for steering in (*self.sketch.steerings, *self.packed.steerings):
            steering.rescale(factor)

    def release(self) -> None:
        """Let go of the scratch buffers of the operators."""
        self._ops.release()

    def reduce(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: Native | None = None,
    ) -> None:
        """Write this rank's shard of the sum or average of all ranks' ``inp`` to ``out``.

        Args:
            out: ``[S]``.
            inp: ``[W * S]``, row ``d`` for rank ``d``; across replicas ``[S]``, and all ranks get
                the same ``out``, which may be ``inp``.
            op: SUM or AVG; any, if the unit has nothing to compress.
            native: reduces units with nothing to compress, and all during the warm-up; default:
                the backend's own reduce-scatter.

        Raises:
            RuntimeError: if buffer, group or operation are not what the plan was made for, before
                anything is sent; or if another rank does not answer in time.
        """
        if self.plan.compressed:
            self._check(out, inp, group, op)
        with failing_in(f"the reduction of gradients of unit {self._name!r}", group):
            self._reduce(out, inp, group, op, native)

    def _reduce(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: Native | None,
    ) -> None:
        self.steps += 1
        warming = self.earlier_steps + self.steps <= self.plan.warmup_steps
        if not self.plan.compressed or warming:
            self._reduce_natively(out, inp, group, op, native)
            return
        self.compressed_steps += 1
        W, D = self.plan.info.world_size, self.plan.destinations
        grad, shard = inp.view(D, -1), out
        if self._flat is not None:
            grad, shard = self._flat.take(grad), self._flat.shard(out.dtype)
        send = self._workspace.take("message_send", (D, self.plan.words), torch.int32)
        received = self._workspace.take("message_recv", (W, self.plan.words), torch.int32)
        with record_function(f"TAGC::encode ({self._name})"):
            self.encode(grad, send, group)
        with record_function(f"TAGC::exchange ({self._name})"):
            if self.plan.for_all:
                pending = gather_messages(received, send, group)
            else:
                pending = all_to_all(received, send, group, self.plan.sent)
            self._message_bytes += pending.wire_bytes
            for columns in self._columns:
                columns.start(group)
            pending.wait()
            for columns in self._columns:
                columns.wait()
        with record_function(f"TAGC::decode ({self._name})"):
            owner = 0 if self.plan.for_all else group.rank()
            self.decode(received, shard, owner, W if op == dist.ReduceOp.AVG else 1)
            if self._flat is not None:
                self._flat.give(shard, out, owner)

    def encode(self, grad: Tensor, send: Tensor, group: dist.ProcessGroup) -> None:
        """First part of a reduction after the warm-up: write this rank's messages.

        Args:
            grad: ``[D, S]``.
            send: ``[D, words]`` int32, written.
        """
        for columns, message in zip(self._columns, self._split(send), strict=True):
            columns.encode(grad, message, group)

    def decode(self, received: Tensor, out: Tensor, owner: int, divisor: int) -> None:
        """Last part: write the sum over ranks, divided by ``divisor``, to ``out`` ``[S]``.

        Args:
            received: ``[W, words]`` int32, message ``r`` from rank ``r``.
            owner: row of ``grad`` that this shard is.
        """
        for columns, message in zip(self._columns, self._split(received), strict=True):
            columns.decode(message, out, owner, divisor)

    def warm_up(self, out: Tensor) -> None:
        """Instead of both, after a dense reduction to ``out`` ``[S]``, in the plan's columns."""
        for columns in self._columns:
            columns.warm_up(out)

    def state(self) -> dict[str, Tensor]:
        """What the next reduction and the counters depend on, beside the residuals; names and
        shapes never change. Waits for what is in flight."""
        counters = [getattr(self, name) for name in _COUNTERS]
        state = {"counters": torch.tensor(counters)}
        for kind, columns in zip(_KINDS, self._columns, strict=True):
            state |= nested(kind, columns.state())
        return state

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        counters = state["counters"]
        if bool(((counters < 0) | (counters > _MOST)).any()):
            raise ValueError("a counter is negative, or larger than any run is long")
        for kind, columns in zip(_KINDS, self._columns, strict=True):
            columns.check_state(part_of(kind, state))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check."""
        for name, value in zip(_COUNTERS, state["counters"].tolist(), strict=True):
            setattr(self, name, value)
        for kind, columns in zip(_KINDS, self._columns, strict=True):
            columns.load_state(part_of(kind, state))

    def _split(self, message: Tensor) -> tuple[Tensor, ...]:
        return message.split([columns.words for columns in self._columns], dim=1)

    def _reduce_natively(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: Native | None,
    ) -> None:
        if not self.plan.for_all:
            pending = (native or dense_reduce_scatter)(out, inp, group, op)
            pending.wait()
        else:
            if out.data_ptr() != inp.data_ptr():
                out.copy_(inp)
            pending = all_reduce_sum(out, group)
            pending.wait()
            if op == dist.ReduceOp.AVG:
                out.div_(self.plan.info.world_size)
        self._native_bytes += pending.wire_bytes
        if self._flat is None:
            self.warm_up(out)
        elif self._follows:
            shard = self._flat.given(out, group.rank())
            self.warm_up(shard)
            self._flat.give(shard, out, group.rank())

    def _check(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
    ) -> None:
        info = self.plan.info
        columns = self.plan.buffer_columns
        if group.size() != info.world_size:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned for {info.world_size} ranks, but FSDP "
                f"reduces over {group.size()}; call tagc.wrap after the model is sharded for good"
            )
        if out.numel() != columns or inp.numel() != columns * self.plan.destinations:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned for {columns} gradient columns per rank, "
                f"but FSDP reduces {out.numel()}: some of its parameters got no gradient in this "
                "backward, or requires_grad changed after tagc.wrap. Freeze parameters before "
                f"tagc.wrap, and {unused_parameters_remedy()}"
            )
        if inp.dtype != info.dtype:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned for gradients of {info.dtype}, but FSDP "
                f"reduces {inp.dtype}; call tagc.wrap after the model's dtypes are set for good"
            )
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise RuntimeError(
                f"tagc: unit {self._name!r} is reduced with {_name_of(op)}, but only SUM and AVG "
                "can be compressed; with a gradient divide factor, also call "
                "set_force_sum_reduction_for_comms(True) on the FSDP modules"
            )


def _name_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    # An operation with a factor is an object that does not say its name.
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next((name for name, kind in kinds if op == kind), str(op))
