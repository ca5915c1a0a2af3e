"""One unit's compressed all-gather, from this rank's shard to every rank's copy of all shards.

Every rank decodes every shard, its own too, from the same messages: all ranks compute with the
same parameters, to the bit. The optimizer's own shard stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codec_plans import DensePlan, QuantizedPlan
from tagc.codecs.dense import elements_of
from tagc.exchange import all_gather, failing_in, gather_messages
from tagc.ops import Ops
from tagc.plan import Segment, UnitPlan
from tagc.workspace import Workspace


class UnitGatherer:
    """Gathers the parameters of one FSDP unit as its plan says.

    Attributes:
        plan: segments of the unit.
        wire_bytes: bytes sent to other ranks so far.
        dense_bytes: what the native all-gathers would have sent.
    """

    def __init__(
        self, plan: UnitPlan, ops: Ops, device: torch.device, workspace: Workspace
    ) -> None:
        self.plan = plan
        self.wire_bytes = 0
        self.dense_bytes = 0
        self._ops, self._workspace = ops, workspace
        self._name = plan.info.name or "(root)"
        self._what = f"the gathering of parameters of unit {self._name!r}"
        self._parts: list[tuple[Segment, slice]] = []
        words = 0
        for segment in plan.segments:
            self._parts.append((segment, slice(words, words + segment.codec.words)))
            words += segment.codec.words
            if isinstance(segment.codec, QuantizedPlan):
                ops.prepare_blocks(segment.codec.layout, plan.info.dtype, None, 0.0)
        self._kept: Tensor | None = None
        self._is_kept = False
        if plan.kept:
            shape = (plan.info.world_size, plan.words)
            self._kept = torch.empty(shape, dtype=torch.int32, device=device)

    def gather(self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, in_backward: bool) -> None:
        """Write all ranks' ``inp`` ``[S]`` to the rows of ``out`` ``[W * S]``.

        Args:
            in_backward: whether FSDP gathers again what it gathered in forward.

        Raises:
            RuntimeError: if the buffer is not what the plan was made for.
        """
        info = self.plan.info
        native = (group.size() - 1) * inp.numel() * inp.element_size()
        self.dense_bytes += native
        if not self.plan.compressed or group.size() != info.world_size:
            # With reshard_after_forward an int, the backward gathers in a smaller group.
            with failing_in(self._what, group):
                all_gather(out, inp, group=group)
            self.wire_bytes += native
            return
        if inp.numel() != self.plan.columns or inp.dtype != info.dtype:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned to gather {self.plan.columns} elements of "
                f"{info.dtype} per rank, but FSDP gathers {inp.numel()} of {inp.dtype}; call "
                "tagc.wrap after the model is sharded and its dtypes are set for good"
            )
        shape = (info.world_size, self.plan.words)
        if self._kept is not None and in_backward and self._is_kept:
            received = self._kept
            self._is_kept = False
        else:
            received = (
                self._workspace.take("parameters_recv", shape, torch.int32)
                if self._kept is None
                else self._kept
            )
            with failing_in(self._what, group):
                self._exchange(received, inp, group)
            self._is_kept = not in_backward
        with record_function(f"TAGC::decode parameters ({self._name})"):
            self._decode(received, out.view(info.world_size, -1))

    def state(self) -> dict[str, Tensor]:
        """The counters. A kept message needs no saving: between two steps there is none that a
        backward still waits for, and the next forward gathers anew."""
        return {"counters": torch.tensor([self.wire_bytes, self.dense_bytes])}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Count on from there."""
        self.wire_bytes, self.dense_bytes = state["counters"].tolist()
        self._is_kept = False

    def release(self) -> None:
        """Let go of the scratch buffers of the operators."""
        self._ops.release()

    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """Squared Euclidean norms of what quantization changes in ``shard`` ``[S]``, and of it."""
        if not self.plan.compressed:
            return 0.0, shard.double().square().sum().item()
        message = torch.empty(1, self.plan.words, dtype=torch.int32, device=shard.device)
        decoded = torch.empty(1, shard.numel(), dtype=shard.dtype, device=shard.device)
        self._encode(shard, message)
        self._decode(message, decoded)
        wide = shard.double()
        return (decoded[0].double() - wide).square().sum().item(), wide.square().sum().item()

    def _exchange(self, received: Tensor, inp: Tensor, group: dist.ProcessGroup) -> None:
        send = self._workspace.take("parameters_send", (1, self.plan.words), torch.int32)
        with record_function(f"TAGC::encode parameters ({self._name})"):
            self._encode(inp, send)
        with record_function(f"TAGC::gather parameters ({self._name})"):
            pending = gather_messages(received, send, group)
            self.wire_bytes += pending.wire_bytes
            pending.wait()

    def _encode(self, inp: Tensor, message: Tensor) -> None:
        for segment, slot in self._parts:
            codec, elements = segment.codec, inp[None, segment.start : segment.stop]
            if isinstance(codec, QuantizedPlan):
                self._ops.quantize(
                    elements, None, message[:, slot], layout=codec.layout, average=0.0
                )
            else:
                assert isinstance(codec, DensePlan)
                elements_of(message[:, slot], codec).copy_(elements)

    def _decode(self, received: Tensor, rows: Tensor) -> None:
        for segment, slot in self._parts:
            codec, elements = segment.codec, rows[:, segment.start : segment.stop]
            if isinstance(codec, QuantizedPlan):
                words = received[:, None, slot]
                self._ops.dequantize(words, elements, layout=codec.layout, divisor=1)
            else:
                assert isinstance(codec, DensePlan)
                elements.copy_(elements_of(received[:, slot], codec))
