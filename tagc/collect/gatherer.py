"""One unit's all-gather, from this rank's shard to every rank's copy of all shards.

Every rank decodes every shard, its own too, from the same messages: all ranks compute with the
same parameters, to the bit. The optimizer's own shard stays exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs import CodecSetup, Coder
from tagc.codecs.state import MAX_COUNT
from tagc.codecs.workspace import Workspace
from tagc.collect.exchange import Broadcast
from tagc.collect.hosts import HostGroups
from tagc.collect.lockstep import Lockstep
from tagc.collect.transport import Connect, Transport, failing_in
from tagc.ops import Ops
from tagc.plan import UnitPlan


class Phase(Enum):
    """What FSDP gathers parameters for."""

    FORWARD = "a forward that autograd records: its backward reads the same parameters"
    BACKWARD = "a backward"
    OTHER = "nothing that a backward reads: evaluation, a teacher, a look at the parameters"


@dataclass(frozen=True, kw_only=True)
class GatherSetup:
    """What a gatherer is made for.

    Attributes:
        hosts: the groups of this rank, where ranks of a host hand messages on.
        connect: makes the transport of a group.
    """

    plan: UnitPlan
    ops: Ops
    device: torch.device
    workspace: Workspace
    hosts: HostGroups | None = None
    connect: Connect = Transport


def gather_coder(setup: GatherSetup) -> Coder:
    """A coder of messages about shards, with a codec for every segment."""
    plan = setup.plan
    made_for = CodecSetup(
        destinations=1,
        world_size=plan.messages.read,
        dtype=plan.info.dtype,
        ops=setup.ops,
        device=setup.device,
        workspace=setup.workspace,
    )
    return Coder(plan.segments, made_for, apart=True)


class UnitGatherer(ABC):
    """Gathers the parameters of one FSDP unit as its plan says.

    Attributes:
        plan: segments of the unit.
        wire_bytes: bytes sent to other ranks so far; to other hosts, where those of a host hand
            messages on.
        dense_bytes: what the native all-gathers would have sent.
        inside_bytes: sent so far to ranks of the same host.
    """

    def __init__(self, setup: GatherSetup) -> None:
        self.plan = setup.plan
        self.wire_bytes = 0
        self.dense_bytes = 0
        self.inside_bytes = 0
        # What the last gather was for, if it brought messages.
        self._last: Phase | None = None
        self._ops, self._workspace = setup.ops, setup.workspace
        self._connect = setup.connect
        self._levels = None
        if setup.hosts is not None:
            self._levels = setup.connect(setup.hosts.across), setup.connect(setup.hosts.inside)
        self._name = self.plan.info.label
        self._lockstep = Lockstep(self.plan.direction, self._name, setup.device)

    def gather(self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """Write all ranks' ``inp`` ``[S]`` to the rows of ``out`` ``[W * S]``.

        Raises:
            RuntimeError: if the buffer is not what the plan was made for; or if parameters changed
                where nothing is sent that would tell the others.
        """
        info, self._last = self.plan.info, None
        # With reshard_after_forward an int, the backward gathers in a smaller group.
        if group.size() != info.world_size:
            inside = info.ranks_per_host % group.size() == 0
            if not inside:
                self.dense_bytes += (group.size() - 1) * inp.numel() * inp.element_size()
            self._gather_natively(out, inp, group, inside=inside)
            return
        self.dense_bytes += (self.plan.peers - 1) * inp.numel() * inp.element_size()
        rows = out.view(info.world_size, -1)
        if not self.plan.compressed:
            self._gather_uncompressed(rows, inp, group)
            return
        if inp.numel() != self.plan.columns or inp.dtype != info.dtype:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned to gather {self.plan.columns} elements of "
                f"{info.dtype} per rank, but FSDP gathers {inp.numel()} of {inp.dtype}; call "
                "tagc.wrap after the model is sharded and its dtypes are set for good"
            )
        self._gather(rows, inp, group, phase)
        self._last = phase

    @abstractmethod
    def _gather(self, rows: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """:meth:`gather` of a unit with anything compressed.

        Args:
            rows: ``[W, S]``.
        """

    @abstractmethod
    def note_forward(self) -> None:
        """A forward that autograd records begins. FSDP gathers now, has done so already
        (prefetching), or finds parameters that are still unsharded. All ranks call it together."""

    def state(self) -> dict[str, Tensor]:
        """What the next step and the counters depend on, between two steps. The names and shapes
        never change."""
        counters = [self.wire_bytes, self.dense_bytes]
        counters += [self.inside_bytes] if self.plan.info.ranks_per_host > 1 else []
        return {"counters": torch.tensor(counters, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        counters = state["counters"]
        if bool(((counters < 0) | (counters > MAX_COUNT)).any()):
            raise ValueError("a counter is negative, or larger than any run is long")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check."""
        self.wire_bytes, self.dense_bytes, *inside = state["counters"].tolist()
        self.inside_bytes = sum(inside)

    @abstractmethod
    def refresh(self) -> None:
        """Send parameters whole in the next forward, if otherwise changes are sent."""

    def release(self) -> None:
        """Let go of the scratch buffers of the operators."""
        self._ops.release()

    @abstractmethod
    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """Squared Euclidean norms of what quantization changes in ``shard`` ``[S]``, and of it;
        of its finite elements."""

    def _gather_uncompressed(self, rows: Tensor, inp: Tensor, group: dist.ProcessGroup) -> None:
        if self.plan.info.ranks_per_host == 1:
            self._gather_natively(rows.view(-1), inp, group)
            return
        exchange = self._broadcast(group)
        self._lockstep.announce(exchange.transports, 0)
        self._lockstep.confirm()
        with failing_in(self._lockstep.what, group):
            self._send(exchange, rows, inp[None])

    def _broadcast(self, group: dist.ProcessGroup) -> Broadcast:
        """For one all-gather."""
        return Broadcast(*(self._levels or [self._connect(group)]))

    def _gather_natively(
        self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, *, inside: bool = False
    ) -> None:
        """By the backend's own collective; perhaps among neighbours inside a host."""
        transport = self._connect(group)
        self._lockstep.check(transport, 0)
        with failing_in(self._lockstep.what, group):
            sent = transport.all_gather(out, inp).wire_bytes
        if inside:
            self.inside_bytes += sent
        else:
            self.wire_bytes += sent

    def _send(self, exchange: Broadcast, received: Tensor, message: Tensor) -> None:
        """``message`` ``[1, n]`` of every rank to the rows of ``received`` ``[W, n]``."""
        work = exchange.send(received, message)
        work.wait()
        self.wire_bytes += work.wire_bytes
        self.inside_bytes += exchange.inside_bytes


def squared_norms(decoded: Tensor, shard: Tensor) -> tuple[float, float]:
    """Of ``decoded - shard`` and of ``shard``, which may hold infinities that arrive; both
    ``[S]``."""
    wide = shard.double()
    off = (decoded.double() - wide).masked_fill_(decoded == shard, 0.0)
    whole = wide.masked_fill(~wide.isfinite(), 0.0)
    return off.square().sum().item(), whole.square().sum().item()
