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

from tagc.codecs.state import check_counts
from tagc.codecs.workspace import Workspace
from tagc.collect.alarm import Alarm
from tagc.collect.hosts import HostGroups
from tagc.collect.lockstep import Lockstep
from tagc.collect.replay import Replay, Store
from tagc.collect.transport import Connect, Transport, failing_in
from tagc.ops import Ops
from tagc.ops.program import Level, Program
from tagc.plan import UnitPlan, as_list
from tagc.plan.gathers import Gathers

# Programs kept bound: those of a unit, and one for each size of exact messages.
_BOUND = 64


class Phase(Enum):
    """Why FSDP gathers parameters."""

    FORWARD = "a forward that autograd records: its backward reads the same parameters"
    BACKWARD = "a backward"
    OTHER = "nothing that a backward reads: evaluation, a teacher, a look at the parameters"
    AHEAD = "nothing yet: a CUDA graph reads the parameters later, where it sends nothing"


@dataclass(frozen=True, kw_only=True)
class GatherSetup:
    """The constructor arguments of gatherers.

    Attributes:
        rank: this process's rank in the unit's group.
        hosts: this rank's groups, if ranks of a host forward messages to each other.
        connect: makes the transport of a group.
    """

    plan: UnitPlan
    ops: Ops
    device: torch.device
    workspace: Workspace
    rank: int = 0
    hosts: HostGroups | None = None
    connect: Connect = Transport


class UnitGatherer(ABC):
    """Gathers the parameters of one FSDP unit by the programs of its plan.

    Attributes:
        plan: the unit's plan.
        store: the tensors of its programs.
        wire_bytes: bytes sent to other ranks so far; only those to other hosts, if ranks of a host
            forward messages to each other.
        dense_bytes: bytes that the native all-gathers would have sent.
        inside_bytes: bytes sent so far to ranks of the same host.
        last_bytes: those of :attr:`wire_bytes` that the last gather with messages sent.
    """

    def __init__(self, setup: GatherSetup) -> None:
        self.plan = setup.plan
        self.wire_bytes = 0
        self.dense_bytes = 0
        self.inside_bytes = self.last_bytes = 0
        # The phase of the last gather, if it used messages.
        self._last: Phase | None = None
        self._ops, self._workspace = setup.ops, setup.workspace
        self._connect = setup.connect
        self._levels: dict[Level, Transport] = {}
        if setup.hosts is not None:
            self._levels["across"] = setup.connect(setup.hosts.across)
            self._levels["inside"] = setup.connect(setup.hosts.inside)
        self._name = self.plan.info.label
        self._lockstep = Lockstep(self.plan.direction, self._name, setup.device)
        self.store = Store(setup.device, setup.workspace)
        self._programs = Gathers(self.plan)
        self._own = setup.rank // self.plan.info.ranks_per_host
        self._replays: dict[tuple[int, Program], Replay] = {}
        # Whether a CUDA graph captures this gather.
        self._capturing = False
        # What a graph holds, and the bytes of one replay; see `_counts`.
        self._captured: list[Replay] = []
        self._captured_bytes: tuple[int, ...] = (0, 0, 0)

    def gather(self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """Write all ranks' ``inp`` ``[S]`` to the rows of ``out`` ``[W * S]``.

        Raises:
            RuntimeError: if the plan was made for another buffer; or if parameters changed although
                this gather sends no message that could carry the change.
        """
        self._capturing = self.store.capturing
        before = self._counts if self._capturing else ()
        self._gather_any(out, inp, group, phase)
        if self._capturing:
            pairs = zip(self._captured_bytes, self._counts, before, strict=True)
            self._captured_bytes = tuple(sent + now - then for sent, now, then in pairs)
            self._capturing = False

    def _gather_any(self, out: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        info, self._last = self.plan.info, None
        # If reshard_after_forward is an int, the backward gathers in a smaller group.
        if group.size() != info.world_size:
            inside = info.ranks_per_host % group.size() == 0
            if not inside:
                self.dense_bytes += (group.size() - 1) * inp.numel() * inp.element_size()
            self._gather_natively(out, inp, group, inside=inside)
            return
        if phase is not Phase.AHEAD:
            self.dense_bytes += (self.plan.peers - 1) * inp.numel() * inp.element_size()
        if not self.plan.compressed:
            self._gather_uncompressed(out, inp, group)
            return
        if inp.numel() != self.plan.columns or inp.dtype != info.dtype:
            raise RuntimeError(
                f"tagc: unit {self._name!r} was planned to gather {self.plan.columns} elements of "
                f"{info.dtype} per rank, but FSDP gathers {inp.numel()} of {inp.dtype}; call "
                "tagc.wrap after the model is sharded and its dtypes are set for good"
            )
        if self.plan.info.ranks_per_host == 1 and "flat" not in self._levels:
            self._levels["flat"] = self._connect(group)
        sent = self.wire_bytes
        self._gather(out, inp, phase)
        self._last = phase
        if self.wire_bytes > sent:  # else it read a copy, or messages again
            self.last_bytes = self.wire_bytes - sent

    @property
    def _counts(self) -> tuple[int, ...]:
        return self.wire_bytes, self.dense_bytes, self.inside_bytes

    @property
    def sends_ahead(self) -> bool:
        """Whether parameters must be sent before a CUDA graph can read them."""
        return False

    @property
    def has_read(self) -> bool:
        """Whether the programs that a CUDA graph will hold have run."""
        return True

    @property
    def steps_before_capture(self) -> int:
        """Steps that must come before a CUDA graph can capture one."""
        return int(bool(self.plan.compressed) and not self._replays)

    def before_capture(self) -> None:
        """Get ready for the capture of a CUDA graph, and its first replay."""
        self._captured.clear()
        self._captured_bytes = (0, 0, 0)
        self._check_alarms()

    def before_replay(self) -> None:
        """Get ready for another replay of the graph, and count the bytes that it sends."""
        self._check_alarms()
        wire, dense, inside = self._captured_bytes
        self.wire_bytes += wire
        self.dense_bytes += dense
        self.inside_bytes += inside

    @abstractmethod
    def _check_alarms(self) -> None:
        """Raise the errors that the device found."""

    @abstractmethod
    def _gather(self, out: Tensor, inp: Tensor, phase: Phase) -> None:
        """:meth:`gather` for units with at least one compressed segment."""

    @abstractmethod
    def note_forward(self) -> None:
        """Note that a forward that autograd records begins. FSDP gathers now, has already gathered
        (prefetching), or finds the parameters still unsharded. All ranks call it together."""

    def state(self) -> dict[str, Tensor]:
        """The gatherer's state between two steps, with counters. Names and shapes never change."""
        counters = [self.wire_bytes, self.dense_bytes, self.last_bytes]
        counters += [self.inside_bytes] if self.plan.info.ranks_per_host > 1 else []
        return {"counters": torch.tensor(counters, dtype=torch.int64, device="cpu")}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never returns."""
        check_counts("counters", state["counters"])

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a :meth:`state` that passes :meth:`check_state`."""
        self.wire_bytes, self.dense_bytes, self.last_bytes, *inside = state["counters"].tolist()
        self.inside_bytes = sum(inside)

    @abstractmethod
    def refresh(self) -> None:
        """Make the next forward send parameters whole, if messages otherwise carry changes."""

    def release(self) -> None:
        """Free the operators' scratch buffers."""
        self._ops.release()

    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """Squared Euclidean norms of the quantization error of ``shard`` ``[S]``, in a message sent
        now, and of the finite elements of ``shard``."""
        if not self.plan.compressed:
            return squared_norms(shard, shard)
        decoded = torch.empty_like(shard)
        self._replay(self._programs.measure).run({"inp": shard, "out": decoded})
        return squared_norms(decoded, shard)

    def _declare(self, *programs: Program) -> None:
        """Make the tensors of programs."""
        for program in programs:
            self.store.declare(*program.places)

    def _run(self, program: Program, out: Tensor, inp: Tensor) -> None:
        """Run a program and count its bytes."""
        self._replay(program).run({"inp": inp, "out": out})
        self.wire_bytes += program.sent
        self.inside_bytes += program.sent_inside

    def _replay(self, program: Program) -> Replay:
        stream = self.store.stream
        replay = self._replays.get((stream, program))
        if replay is None:
            if len(self._replays) >= _BOUND:
                self._replays.clear()
            replay = Replay(program, self.store, self._ops, self._levels, self._lockstep, self._own)
            self._replays[stream, program] = replay
        if self._capturing:
            self._captured.append(replay)
        return replay

    def _measured(self, inp: Tensor) -> Tensor:
        """What each segment whose messages vary measured of ``inp`` ``[S]``; int32."""
        assert self._programs.sizes is not None
        self._replay(self._programs.sizes).run({"inp": inp})
        return torch.cat([self.store[place][0, :1] for place in self._programs.measured.values()])

    def _largest(self, mine: Tensor) -> Tensor:
        """The largest of all ranks' numbers ``[n]``, for each of them."""
        for level, transport in self._levels.items():
            self._lockstep.check(transport, len(mine))
            with failing_in(self._lockstep.what, transport.group):
                everyones = mine.new_empty(transport.size, len(mine))
                work = transport.gather(everyones, mine[None])
                work.wait()
            mine = everyones.amax(0)
            if level == "inside":
                self.inside_bytes += work.wire_bytes
            else:
                self.wire_bytes += work.wire_bytes
        return mine

    def _gather_uncompressed(self, out: Tensor, inp: Tensor, group: dist.ProcessGroup) -> None:
        if self.plan.info.ranks_per_host == 1:
            self._gather_natively(out, inp, group)
            return
        across, inside = self._levels["across"], self._levels["inside"]
        self._lockstep.announce([inside, across], 0)
        self._lockstep.confirm()
        with failing_in(self._lockstep.what, group):
            hosts = self._workspace.take("across_recv", (across.size, inp.numel()), inp.dtype)
            work = across.gather(hosts, inp[None])
            work.wait()
            self.wire_bytes += work.wire_bytes
            work = inside.gather_each(out.view(across.size, inside.size, -1), hosts)
            work.wait()
            self.inside_bytes += work.wire_bytes

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


class MessageGatherer(UnitGatherer):
    """Sends messages that each describe a whole shard: in every all-gather, or in forward only, if
    ranks keep them for the backward."""

    def __init__(self, setup: GatherSetup) -> None:
        super().__init__(setup)
        plan, programs = self.plan, self._programs
        self._changed = Alarm(
            f"tagc: the parameters of unit {self._name!r} changed between a forward and its "
            "backward (by an optimizer's step, or by loading weights). FSDP would gather them "
            "again, but with 'keep_for_backward' nothing is sent in backward: change parameters "
            "after the backward, or set 'keep_for_backward: false'",
            self.store,
            programs.changed,
        )
        self._unfit = [
            Alarm(
                f"tagc: frozen parameters of unit {self._name!r} "
                f"({as_list([param.name for param in segment.params])}) hold values that "
                f"{segment.codec.name} cannot carry (not finite, or at the edge of "
                f"{plan.info.dtype}), but did not in tagc.wrap. Set them before tagc.wrap, "
                "which then gathers such parameters uncompressed; or wrap again now, after "
                "tagc.compressor(model).remove()",
                self.store,
                flag,
            )
            for segment, flag in programs.unfit.items()
        ]
        # Whether the messages of the last forward that autograd recorded are kept.
        self._kept = False
        if plan.compressed:
            if programs.sizes is not None:
                self._declare(programs.sizes)
            self._declare(programs.message)
            if plan.reuses_forward_message:
                self._declare(programs.kept_message, programs.again)

    def _check_alarms(self) -> None:
        for alarm in (self._changed, *self._unfit):
            alarm.check()

    def before_capture(self) -> None:
        self._refuse_capture(soon=True)
        super().before_capture()

    def _refuse_capture(self, *, soon: bool = False) -> None:
        if self._programs.sizes is not None and (soon or self._capturing):
            raise RuntimeError(
                f"tagc: a CUDA graph cannot hold the parameters of unit {self._name!r}: with codec "
                "'exact' and 'keep_copy: false' ranks agree on the size of every message; set "
                "'keep_copy: true', or train without a graph"
            )

    def _gather(self, out: Tensor, inp: Tensor, phase: Phase) -> None:
        self._check_alarms()
        keeps, programs = self.plan.reuses_forward_message, self._programs
        if phase is Phase.BACKWARD and self._kept:
            self._run(programs.again, out, inp)
            # Gathering again is not possible: other ranks may not know that they have to.
            self._changed.note()
        else:
            kept = keeps and phase is Phase.FORWARD
            if programs.sizes is not None:
                self._run(self._fitting(inp), out, inp)
            else:
                self._run(programs.kept_message if kept else programs.message, out, inp)
            # All ranks have the same messages, so all raise. (Trainable parameters come out NaN
            # instead, as in a run that diverges natively.)
            for alarm in self._unfit:
                alarm.note()
        if phase is not Phase.OTHER:
            self._kept = keeps and phase is Phase.FORWARD

    def _fitting(self, inp: Tensor) -> Program:
        """The program for messages whose sizes vary: all ranks choose by the largest one, unless
        even the shortest are not shorter than the parameters."""
        self._refuse_capture()
        if not self._programs.saves:
            return self._programs.uncompressed
        fitted = self._programs.fitted(self._largest(self._measured(inp)).tolist())
        return fitted.message if fitted.saves else fitted.uncompressed

    def note_forward(self) -> None:
        # If parameters are still unsharded, after an evaluation or `unshard()`, this forward
        # gathers nothing. A kept message is then from an earlier forward, whose backward may never
        # have gathered. If this forward does gather, it keeps a new message.
        if self._last is not Phase.FORWARD:
            self._kept = False

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UnitGatherer.load_state`. (A forward's message need not be saved: between two
        steps no backward still needs it, and the next forward gathers again.)"""
        super().load_state(state)
        self._kept = False

    def refresh(self) -> None:
        """See :meth:`UnitGatherer.refresh`. Every message already carries the whole shard."""


def squared_norms(decoded: Tensor, shard: Tensor) -> tuple[float, float]:
    """Squared norms of ``decoded - shard`` and of the finite elements of ``shard``, both ``[S]``.
    Equal infinities differ by 0."""
    wide = shard.double()
    off = (decoded.double() - wide).masked_fill_(decoded == shard, 0.0)
    whole = wide.masked_fill(~wide.isfinite(), 0.0)
    return off.square().sum().item(), whole.square().sum().item()
