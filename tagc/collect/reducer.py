"""Reduces one unit's gradients, from FSDP's buffer to this rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs.sketch import COUNTING
from tagc.codecs.workspace import Workspace
from tagc.collect.hosts import HostGroups
from tagc.collect.lockstep import check_reduction, refuse_others
from tagc.collect.reducer_state import ReducerState
from tagc.collect.replay import Replay
from tagc.collect.transport import CollectiveWork, Connect, Transport, failing_in
from tagc.ops import Ops
from tagc.ops.program import Level, Program
from tagc.plan import UnitPlan
from tagc.plan.part import Part
from tagc.plan.reductions import Variant

ReduceNatively = Callable[[Tensor, Tensor, Transport, dist.ReduceOp.RedOpType], CollectiveWork]
"""Reduces the second argument to the first; where all ranks get all rows, both may be one."""

# Variants kept bound. Backwards may reach ever different parts of a unit.
_BOUND = 32


class _Captured(NamedTuple):
    """A reduction that a CUDA graph holds.

    Attributes:
        variant: None if it is native.
        sent: bytes, by level and flight.
        held: what must live as long as the graph.
    """

    variant: Variant | None
    sent: Mapping[tuple[str, str], int]
    held: object


class _Usual(NamedTuple):
    """What was decided for a reduction, and holds for all that are called alike."""

    call: tuple[object, ...]
    variant: Variant
    replay: Replay


class UnitReducer(ReducerState):
    """Reduces the gradient buffer of one unit by the programs of its plan.

    One message to each destination carries all columns; cells of sketches are summed separately.
    A unit with nothing to compress, and any unit during its warm-up, is summed uncompressed: by the
    backend's own collective, unless ranks of a host add up first.
    """

    def __init__(
        self,
        plan: UnitPlan,
        ops: Ops,
        device: torch.device,
        workspace: Workspace,
        seed: int,
        *,
        rank: int = 0,
        hosts: HostGroups | None = None,
        crosses: Callable[[], bool] = lambda: True,
        connect: Connect = Transport,
    ) -> None:
        """Start with empty state.

        Args:
            rank: this process's rank among all processes.
            hosts: this rank's groups, if ranks of a host add up first.
            crosses: says whether hosts exchange anything in this backward, if ranks of a host add
                up first. If not, their sum waits. It must return the same on all ranks.
            connect: makes the transport of a group.
        """
        self._crosses, self._connect = crosses, connect
        self._levels: dict[Level, Transport] = {}
        if hosts is not None:
            self._levels["across"] = connect(hosts.across)
            self._levels["inside"] = connect(hosts.inside)
        self._group: dist.ProcessGroup | None = None
        self._replays: dict[tuple[int, Variant], Replay] = {}
        self._usual: _Usual | None
        # Whether a CUDA graph may capture the next reduction, and those that it captured: several
        # if backwards reach the unit's parameters one after another.
        self._may_capture = False
        self._captured: list[_Captured] = []
        super().__init__(plan, ops, device, workspace, seed=seed, rank=rank)

    def reduce(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: ReduceNatively | None = None,
        reached: Set[str] | None = None,
    ) -> None:
        """Sum or average all ranks' ``inp`` and write this rank's shard to ``out``; write zeros if
        the gradient waits inside the host.

        Args:
            out: ``[S]``.
            inp: ``[W * S]``, row ``d`` for rank ``d``; across replicas ``[S]``, and all ranks get
                the same ``out``, which may be ``inp``. With DDP on hosts of ``R`` ranks both are
                ``[R * S]``.
            op: SUM or AVG; any, if the unit has nothing to compress.
            native: reduces units with nothing to compress, and all units during the warm-up;
                default: the backend's own reduce-scatter, or all-reduce.
            reached: names of the parameters in the buffers, the same on every rank, if the backward
                did not reach all of them; see :mod:`tagc.plan.part`.

        Raises:
            RuntimeError: if the plan was made for another buffer, group or operation (nothing is
                sent then), or if another rank does not answer in time.
        """
        counters, usual = self.counters, self._usual
        if self.before is not None:
            self.before(counters.all_steps)
        self._mix_up.check()
        late, capturing = {"inp": inp, "out": out}, self.store.capturing
        call = (reached, group, op, inp.dtype, inp.numel(), out.numel(), self.store.stream)
        if usual is not None and usual.call == call and not capturing:
            self._may_capture = False
            variant, replay = usual.variant, usual.replay
            if not self.stamped:
                self._announce(variant, None)
        else:
            chosen = self._choose(late, group, op, native, reached)
            if chosen is None:
                return
            variant, replay = chosen, self._replay(chosen)
            lasts = variant.messages and variant.begun and reached is None and self.gauge is None
            if lasts and not capturing and self.plan.info.ranks_per_host == 1:
                self._usual = _Usual(call, variant, replay)
        if variant.messages and not capturing:
            self.prepare_messages(1, noise=variant.noise)
        counters.steps += 1
        counters.compressed_steps += variant.messages
        for _ in replay.running(late):
            pass
        self._note_run(variant, replay, capturing=capturing)
        if variant.stamped and self.plan.messages.sent is None:
            self._mix_up.note()

    def _choose(
        self,
        late: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: ReduceNatively | None,
        reached: Set[str] | None,
    ) -> Variant | None:
        """Choose the variant of a reduction, tell the other ranks, and do what comes before its
        messages. Return None if that was all."""
        plan, inp, out = self.plan, late["inp"], late["out"]
        part = None if reached is None else Part(plan, frozenset(reached))
        if plan.compressed:
            check_reduction(plan, part, out, inp, group, op)
        on_hosts = plan.info.ranks_per_host > 1 and self._adds_inside(group, op)
        stays = on_hosts and not self._crosses()
        capturing = self.check_capture(waits=stays)
        warm = self.counters.all_steps >= plan.warmup_steps
        # If the part has nothing compressed, expanding it to all columns would send mostly zeros.
        whole = part is None or part.compressed or (on_hosts and (stays or bool(self.waiting)))
        messages = bool(plan.compressed) and warm and whole
        if not messages and not (on_hosts and whole):
            self._reduce_natively(out, inp, group, op, native, 0 if part is None else part.mark)
            return None
        if group is not self._group and not on_hosts:
            self._group, self._levels["flat"] = group, self._connect(group)
            self._usual = None
            self._replays.clear()
        if self.stamped is None:
            self.stamped = not self._transport.by_messages(self.store.device)
        mean = op == dist.ReduceOp.AVG
        variant = self.variant(messages=messages, mean=mean, part=part, always=capturing)
        self._announce(variant, part, on_hosts=on_hosts, stays=stays)
        if not on_hosts or not (stays or self.waiting):
            return variant
        inside = variant._replace(levels="inside")
        replay = self._replay(inside)
        for _ in replay.running(late):
            pass
        self._note_run(inside, replay, capturing=capturing)
        total = self.store.take(self.programs.total)
        if stays:
            self.waiting.add(total, part)
            out.zero_()
            return None
        self.waiting.hand_over(total, part)
        return variant._replace(levels="across")

    def _note_run(self, variant: Variant, replay: Replay, *, capturing: bool) -> None:
        self.advance(variant)
        self.counters.add(replay.sent)
        if capturing:
            self._captured.append(_Captured(variant, replay.sent, replay))

    def _replay(self, variant: Variant) -> Replay:
        stream = self.store.stream
        replay = self._replays.get((stream, variant))
        if replay is None:
            if len(self._replays) >= _BOUND:
                self._replays.clear()
            replay = self._bind(self.programs.lower(variant))
            self._replays[stream, variant] = replay
        return replay

    def _bind(self, program: Program) -> Replay:
        own = self._transport.rank if self._levels else 0
        return Replay(program, self.store, self._ops, self._levels, self._lockstep, own)

    @property
    def _transport(self) -> Transport:
        """Connects the ranks that send each other messages."""
        return self._levels["flat" if self.plan.info.ranks_per_host == 1 else "across"]

    def _announce(
        self,
        variant: Variant,
        part: Part | None,
        *,
        on_hosts: bool = False,
        stays: bool = False,
    ) -> None:
        """Tell the other ranks which collective this rank is at."""
        mark = 0 if part is None else part.mark
        if self.stamped:
            if variant.messages:
                self.mark_stamps(self._lockstep.stamp(mark))
            return
        levels = self._levels
        # Other hosts take no part in a micro-batch that stays inside.
        sends_to: list[Level] = ["inside"] if stays else ["inside", "across"]
        transports = [levels[level] for level in sends_to] if on_hosts else [levels["flat"]]
        words = self.plan.words if variant.messages and not stays else 0
        self._lockstep.announce(transports, words, self.counters.all_steps, mark)

    def _reduce_natively(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: ReduceNatively | None,
        mark: int,
    ) -> None:
        transport, lockstep = self._connect(group), self._lockstep
        lockstep.announce([transport], 0, self.counters.all_steps, mark)
        lockstep.confirm()
        self.counters.steps += 1
        if native is None:
            native = _all_reduce if self.plan.for_all else _reduce_scatter
        with failing_in(lockstep.what, group):
            work = native(out, inp, transport, op)
            work.wait()
        self.counters.native_bytes += work.wire_bytes
        if self.store.capturing:
            self._captured.append(_Captured(None, {("flat", "sums"): work.wire_bytes}, work))

    @property
    def steps_before_capture(self) -> int:
        """Reductions that must come before a CUDA graph can capture one: those of the warm-up, and
        one with messages, which makes what later ones use."""
        if not self.plan.compressed:
            return 0
        begun = any(variant.messages for _, variant in self._replays)
        begun = begun and (self.progress.begun or self.programs.sketches is None)
        return max(0, self.plan.warmup_steps - self.counters.all_steps) + (not begun)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph holds a reduction."""
        return bool(self._captured)

    def before_capture(self) -> None:
        """Get ready for the capture of a CUDA graph with the next reduction, and its first
        replay."""
        self._captured, self._may_capture = [], True
        if self.plan.compressed:
            self._before_graph(1, noise=self.gauge is not None)

    def check_replay(self) -> None:
        """Raise RuntimeError if the next step would not do what the graph does, as after a load."""
        found = self._captured_messages
        why = self._why_not(waits=False) if found else ""
        if found and self.gauge is not None and not any(v.noise for v in found):
            why = why or "it does not measure noise, which was asked for later: capture another one"
        if why:
            raise RuntimeError(f"tagc: the CUDA graph does not hold {self._lockstep.what}: {why}")

    def before_replay(self) -> None:
        """Get ready for another replay of the graph, and count the reductions that it holds."""
        self._may_capture = False
        if self.before is not None and self._captured:
            self.before(self.counters.all_steps)
        found = self._captured_messages
        if found:
            self._before_graph(len(found), noise=any(v.noise for v in found))
        self.counters.compressed_steps += len(found)
        for variant in found:
            self.advance(variant)
        for captured in self._captured:
            self.counters.steps += 1
            self.counters.add(captured.sent)

    @property
    def _captured_messages(self) -> list[Variant]:
        """The variants with messages that the graph holds."""
        return [c.variant for c in self._captured if c.variant is not None and c.variant.messages]

    def _before_graph(self, messages: int, *, noise: bool) -> None:
        self._mix_up.check()
        self.store.wait(COUNTING)  # a graph cannot wait for what began outside of it
        if self.stamped:
            self._stamped = None  # replays may have marked other parts of the unit
            self.mark_stamps(self._lockstep.stamp())
        self.prepare_messages(messages, noise=noise)

    def check_capture(self, *, waits: bool) -> bool:
        """Whether a CUDA graph captures this reduction; raises RuntimeError if its replays cannot
        repeat it.

        Args:
            waits: whether the gradient stays inside the host or replica.
        """
        if not self.store.capturing:
            self._may_capture = False
            return False
        why = self._why_not(waits=waits)
        if not self._may_capture:
            why = "call tagc.compressor(model).before_capture() right before the capture"
        if why:
            raise RuntimeError(f"tagc: a CUDA graph cannot hold {self._lockstep.what}: {why}")
        return True

    def _why_not(self, *, waits: bool) -> str:
        """Why the next reduction is not one for a CUDA graph; empty if it is."""
        if waits or self.waiting:
            return "micro-batches wait for a later one: let every backward reduce its gradients"
        if self.steps_before_capture:
            return f"first run {self.steps_before_capture} steps without a graph"
        return ""

    def _adds_inside(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> bool:
        """Whether ranks of a host add up first where hosts have several, the same on all ranks. A
        unit with nothing compressed may be reduced with any operation over any group; then the
        backend does it."""
        known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if known and group.size() == self.plan.info.world_size:
            return True
        if self.waiting:
            refuse_others(self.plan, op, group.size())
        return False


def _reduce_scatter(
    out: Tensor, inp: Tensor, transport: Transport, op: dist.ReduceOp.RedOpType
) -> CollectiveWork:
    return transport.reduce_scatter(out, inp, op)


def _all_reduce(
    out: Tensor, inp: Tensor, transport: Transport, op: dist.ReduceOp.RedOpType
) -> CollectiveWork:
    """The sum, which is then divided."""
    if out.data_ptr() != inp.data_ptr():
        out.copy_(inp.view_as(out))
    work = transport.all_reduce(out)
    work.wait()
    if op == dist.ReduceOp.AVG:
        out.div_(transport.size)
    return work
