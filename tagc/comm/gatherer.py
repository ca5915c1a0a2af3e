"""One unit's compressed all-gather, from this rank's shard to every rank's copy of all shards.

Every rank decodes every shard, its own too, from the same messages: all ranks compute with the
same parameters, to the bit. The optimizer's own shard stays exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs import Codec, CodecSetup, kind_of
from tagc.codecs.workspace import Workspace
from tagc.comm.alarm import Alarm
from tagc.comm.collectives import all_gather, failing_in
from tagc.comm.exchanges import BroadcastExchange, Connect, GroupExchange
from tagc.comm.lockstep import Lockstep
from tagc.ops import Ops
from tagc.plan import UnitPlan


class Phase(Enum):
    """What FSDP gathers parameters for."""

    FORWARD = "a forward that autograd records: its backward reads the same parameters"
    BACKWARD = "a backward"
    OTHER = "nothing that a backward reads: evaluation, a teacher, a look at the parameters"


class UnitGatherer:
    """Gathers the parameters of one FSDP unit as its plan says.

    Attributes:
        plan: segments of the unit.
        wire_bytes: bytes sent to other ranks so far; to other hosts, where those of a host hand
            messages on.
        dense_bytes: what the native all-gathers would have sent.
        inside_bytes: sent so far to ranks of the same host.
    """

    def __init__(
        self,
        plan: UnitPlan,
        ops: Ops,
        device: torch.device,
        workspace: Workspace,
        *,
        connect: Connect | None = None,
    ) -> None:
        """New state.

        Args:
            connect: the exchange over a group, for one all-gather; by default one that knows no
                hosts.
        """
        self.plan = plan
        self.wire_bytes = 0
        self.dense_bytes = 0
        self.inside_bytes = 0
        self._ops, self._workspace = ops, workspace
        self._connect = connect or (lambda group: BroadcastExchange(group, workspace))
        self._name = plan.info.label
        self._lockstep = Lockstep(plan.direction, self._name, device)
        setup = CodecSetup(
            destinations=1,
            world_size=plan.info.world_size,
            dtype=plan.info.dtype,
            ops=ops,
            device=device,
            workspace=workspace,
        )
        # A codec a segment: here words lie in the order of the columns.
        self._codecs: list[Codec[Any]] = [
            kind_of(segment.codec).codec([segment], setup) for segment in plan.segments
        ]
        self._changed = Alarm(
            f"tagc: the parameters of unit {self._name!r} are others in a backward than in its "
            "forward (an optimizer's step, or weights loaded in between). FSDP would gather them "
            "again, but with 'keep_for_backward' nothing is sent in backward: change parameters "
            "after the backward, or set 'keep_for_backward: false'"
        )
        # The message of the last forward with a backward to come, while that has not read it.
        self._forward_message: Tensor | None = None
        self._has_forward_message = False
        if plan.reuses_forward_message:
            shape = (plan.info.world_size, plan.words)
            self._forward_message = torch.empty(shape, dtype=torch.int32, device=device)

    def gather(self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """Write all ranks' ``inp`` ``[S]`` to the rows of ``out`` ``[W * S]``.

        Raises:
            RuntimeError: if the buffer is not what the plan was made for; or if a backward would
                read the message of a forward that had other parameters, see :class:`Alarm`.
        """
        info = self.plan.info
        # With reshard_after_forward an int, the backward gathers in a smaller group.
        planned = group.size() == info.world_size
        if not planned:
            inside = info.ranks_per_host % group.size() == 0
            if not inside:
                self.dense_bytes += (group.size() - 1) * inp.numel() * inp.element_size()
            self._gather_natively(out, inp, group, inside=inside)
            return
        self.dense_bytes += (self.plan.peers - 1) * inp.numel() * inp.element_size()
        exchange = self._connect(group)
        if not self.plan.compressed:
            if info.ranks_per_host == 1:
                self._gather_natively(out, inp, group)
            else:
                self._lockstep.announce(exchange.groups, 0)
                self._lockstep.confirm()
                with failing_in(self._lockstep.what, group):
                    self._send(exchange, out.view(info.world_size, -1), inp[None])
            return
        if inp.numel() != self.plan.columns or inp.dtype != info.dtype:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned to gather {self.plan.columns} elements of "
                f"{info.dtype} per rank, but FSDP gathers {inp.numel()} of {inp.dtype}; call "
                "tagc.wrap after the model is sharded and its dtypes are set for good"
            )
        self._changed.check()
        rows = out.view(info.world_size, -1)
        kept = self._forward_message
        reads_kept = phase is Phase.BACKWARD and self._has_forward_message
        if kept is not None and (reads_kept or phase is Phase.FORWARD):
            received = kept
        else:
            shape = (info.world_size, self.plan.words)
            received = self._workspace.take("parameters_recv", shape, torch.int32)
        # Before anything is decoded: `inp` is this rank's row of `out`.
        changed = self._differs(inp, received[group.rank()]) if reads_kept else None
        if not reads_kept:
            self._lockstep.announce(exchange.groups, self.plan.words)
            with failing_in(self._lockstep.what, group):
                self._exchange(received, inp, exchange)
        with record_function(f"TAGC::decode parameters ({self._name})"):
            self._decode(received, rows)
        if changed is not None:
            # To gather anew is no way out: other ranks may not know that they have to.
            self._changed.note(changed, rows[:, :1])
        if phase is not Phase.OTHER:
            self._has_forward_message = kept is not None and phase is Phase.FORWARD

    def state(self) -> dict[str, Tensor]:
        """The counters. The forward's message needs no saving: between two steps no backward still
        waits for it, and the next forward gathers anew."""
        counters = [self.wire_bytes, self.dense_bytes]
        counters += [self.inside_bytes] if self.plan.info.ranks_per_host > 1 else []
        return {"counters": torch.tensor(counters, dtype=torch.int64)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Count on from there."""
        self.wire_bytes, self.dense_bytes, *inside = state["counters"].tolist()
        self.inside_bytes = sum(inside)
        self._has_forward_message = False

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

    def _differs(self, inp: Tensor, message: Tensor) -> Tensor:
        """Whether ``inp`` ``[S]`` has another message than ``[words]``; boolean, ``[]``."""
        now = self._workspace.take("parameters_send", (1, self.plan.words), torch.int32)
        self._encode(inp, now)
        return (now[0] != message).any()

    def _gather_natively(
        self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, *, inside: bool = False
    ) -> None:
        """By the backend's own collective; perhaps among neighbours inside a host."""
        self._lockstep.check(group, 0)
        with failing_in(self._lockstep.what, group):
            all_gather(out, inp, group=group)
        sent = (group.size() - 1) * inp.numel() * inp.element_size()
        if inside:
            self.inside_bytes += sent
        else:
            self.wire_bytes += sent

    def _exchange(self, received: Tensor, inp: Tensor, exchange: GroupExchange) -> None:
        send = self._workspace.take("parameters_send", (1, self.plan.words), torch.int32)
        with record_function(f"TAGC::encode parameters ({self._name})"):
            self._encode(inp, send)
        with record_function(f"TAGC::gather parameters ({self._name})"):
            self._lockstep.confirm()
            self._send(exchange, received, send)

    def _send(self, exchange: GroupExchange, received: Tensor, message: Tensor) -> None:
        """``message`` ``[1, n]`` of every rank to the rows of ``received`` ``[W, n]``."""
        work = exchange.send(received, message)
        work.wait()
        self.wire_bytes += work.wire_bytes
        self.inside_bytes += exchange.inside_bytes

    def _encode(self, inp: Tensor, message: Tensor) -> None:
        """``[S]`` to ``[1, words]``."""
        for codec, words in zip(self._codecs, self._split(message), strict=True):
            codec.encode_rows(inp[None], words)

    def _decode(self, received: Tensor, rows: Tensor) -> None:
        """``[R, words]`` to ``[R, S]``."""
        for codec, words in zip(self._codecs, self._split(received), strict=True):
            codec.decode_rows(words, rows)

    def _split(self, message: Tensor) -> tuple[Tensor, ...]:
        return message.split([codec.words for codec in self._codecs], dim=1)
