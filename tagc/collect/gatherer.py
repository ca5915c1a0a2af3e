"""All-gathers one unit's parameters, from this rank's shard to all shards on every rank.

Every rank decodes every shard, including its own, from the same messages. So all ranks compute with
the same parameters, bit for bit. The optimizer's own shard stays exact.
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
    """Why FSDP gathers parameters."""

    FORWARD = "a forward that autograd records: its backward reads the same parameters"
    BACKWARD = "a backward"
    OTHER = "nothing that a backward reads: evaluation, a teacher, a look at the parameters"


@dataclass(frozen=True, kw_only=True)
class GatherSetup:
    """The constructor arguments of gatherers.

    Attributes:
        hosts: this rank's groups, if ranks of a host forward messages to each other.
        connect: makes the transport of a group.
    """

    plan: UnitPlan
    ops: Ops
    device: torch.device
    workspace: Workspace
    hosts: HostGroups | None = None
    connect: Connect = Transport


def gather_coder(setup: GatherSetup) -> Coder:
    """The coder of a unit's messages about shards, with a codec for every segment."""
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
        plan: the unit's plan.
        wire_bytes: bytes sent to other ranks so far; only those to other hosts, if ranks of a host
            forward messages to each other.
        dense_bytes: bytes that the native all-gathers would have sent.
        inside_bytes: bytes sent so far to ranks of the same host.
    """

    def __init__(self, setup: GatherSetup) -> None:
        self.plan = setup.plan
        self.wire_bytes = 0
        self.dense_bytes = 0
        self.inside_bytes = 0
        # The phase of the last gather, if it used messages.
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
            RuntimeError: if the plan was made for another buffer; or if parameters changed although
                this gather sends no message that could carry the change.
        """
        info, self._last = self.plan.info, None
        # If reshard_after_forward is an int, the backward gathers in a smaller group.
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
        """:meth:`gather` for units with at least one compressed segment.

        Args:
            rows: ``[W, S]``.
        """

    @abstractmethod
    def note_forward(self) -> None:
        """Note that a forward that autograd records begins. FSDP gathers now, has already gathered
        (prefetching), or finds the parameters still unsharded. All ranks call it together."""

    def state(self) -> dict[str, Tensor]:
        """The gatherer's state between two steps, with counters. Names and shapes never change."""
        counters = [self.wire_bytes, self.dense_bytes]
        counters += [self.inside_bytes] if self.plan.info.ranks_per_host > 1 else []
        return {"counters": torch.tensor(counters, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        counters = state["counters"]
        if bool(((counters < 0) | (counters > MAX_COUNT)).any()):
            raise ValueError("a counter is negative, or larger than any run is long")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`."""
        self.wire_bytes, self.dense_bytes, *inside = state["counters"].tolist()
        self.inside_bytes = sum(inside)

    @abstractmethod
    def refresh(self) -> None:
        """Make the next forward send parameters whole, if messages otherwise carry changes."""

    def release(self) -> None:
        """Free the operators' scratch buffers."""
        self._ops.release()

    @abstractmethod
    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """Squared Euclidean norms of the quantization error of ``shard`` ``[S]``, and of the finite
        elements of ``shard``."""

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
        """A new broadcast, for one all-gather."""
        return Broadcast(self._workspace, *(self._levels or [self._connect(group)]))

    def _gather_natively(
        self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, *, inside: bool = False
    ) -> None:
        """Gather with the backend's own collective.

        Args:
            inside: whether ``group`` lies inside a host, which decides the counter of its bytes.
        """
        transport = self._connect(group)
        self._lockstep.check(transport, 0)
        with failing_in(self._lockstep.what, group):
            sent = transport.all_gather(out, inp).wire_bytes
        if inside:
            self.inside_bytes += sent
        else:
            self.wire_bytes += sent

    def _send(self, exchange: Broadcast, received: Tensor, message: Tensor) -> None:
        """Gather every rank's ``message`` ``[1, n]`` to the rows of ``received`` ``[W, n]``."""
        work = exchange.send(received, message)
        work.wait()
        self.wire_bytes += work.wire_bytes
        self.inside_bytes += exchange.inside_bytes


def squared_norms(decoded: Tensor, shard: Tensor) -> tuple[float, float]:
    """Squared norms of ``decoded - shard`` and of the finite elements of ``shard``, both ``[S]``.
    Equal infinities differ by 0."""
    wide = shard.double()
    off = (decoded.double() - wide).masked_fill_(decoded == shard, 0.0)
    whole = wide.masked_fill(~wide.isfinite(), 0.0)
    return off.square().sum().item(), whole.square().sum().item()
