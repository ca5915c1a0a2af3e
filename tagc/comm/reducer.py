"""One unit's compressed reduction, from FSDP's buffer to this rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.codecs import STAMP_WORDS, Codec, CodecSetup, Coder, SelectionCount
from tagc.codecs.feedback import MeasuredShare, SegmentFeedback
from tagc.codecs.workspace import Workspace
from tagc.comm.collectives import CollectiveWork, dense_reduce_scatter, failing_in
from tagc.comm.exchanges import BroadcastExchange, Connect, GroupExchange, ShardExchange
from tagc.comm.flat import flat_rows
from tagc.comm.gauge import NoiseGauge
from tagc.comm.host_sum import HostSum
from tagc.comm.lockstep import Lockstep
from tagc.comm.part import Part
from tagc.comm.reducer_state import Counters, Parts, check_parts, load_parts, state_of
from tagc.comm.reduction_check import check_reduction
from tagc.comm.second_shot import SecondShot
from tagc.comm.set_aside import Debt, set_aside
from tagc.comm.waiting import Waiting
from tagc.ops import Ops
from tagc.plan import UnitPlan

Native = Callable[[Tensor, Tensor, dist.ProcessGroup, dist.ReduceOp.RedOpType], CollectiveWork]


class UnitReducer:
    """Reduces the gradient buffer of one FSDP unit as its plan says.

    All columns travel in one message to each destination; sketches have their cells summed
    beside it. Without anything compressed, and during the warm-up, the backend's own collective
    runs on the whole buffer.

    Attributes:
        plan: segments of the unit.
        coder: of the messages, with the codecs' state.
        counters: of reductions and bytes.
        inside: the sum of the host's ranks, where those add up first.
        waiting: micro-batches that stay inside a host, or in a replica.
        second: the second of two shots, where replicas of a shard take two.
        gauge: measures how much larger gradients come out than densely; None where nobody asked.
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
        connect: Connect | None = None,
        crosses: Callable[[], bool] = lambda: True,
    ) -> None:
        """New state.

        Args:
            rank: of this process, of all.
            connect: the exchange over a group, for one reduction; by default the one for the
                plan's direction, every rank sending for itself.
            crosses: whether hosts exchange anything in this backward, if ranks of a host add up
                first; where not, their sum waits. The same on all ranks.
        """
        self.plan = plan
        self._ops, self._workspace = ops, workspace
        self._connect, self._crosses = connect or self._default_exchange, crosses
        self._name = plan.info.label
        self._lockstep = Lockstep(plan.direction, self._name, device)
        self._flat = flat_rows(plan, workspace)
        # What is encoded: the unit, or its slices.
        self._encoded = plan if plan.shots is None else plan.shots.reduce
        self._setup = CodecSetup(
            destinations=self._encoded.destinations,
            world_size=self._encoded.sources,
            dtype=plan.info.dtype,
            ops=ops,
            device=device,
            workspace=workspace,
            seed=seed,
            rank=rank,
            stage=1 if plan.direction == "replicas" else 0,
        )
        self.second = None if plan.shots is None else SecondShot(plan, self._setup)
        self.gauge: NoiseGauge | None = None
        # Inside hosts in float32, whatever FSDP reduces: there may be many of them.
        inside = plan.direction == "gradients"
        self.waiting = Waiting(plan, torch.float32 if inside else None)
        self.reset()

    def reset(self, earlier_steps: int = 0) -> None:
        """Start anew, with empty residuals, after so many reductions elsewhere."""
        self.coder = Coder(self._encoded.segments, self._setup)
        compressed_before = max(0, earlier_steps - self.plan.warmup_steps)
        self.coder.skip(compressed_before)
        if self.second is not None:
            self.second.reset(compressed_before)
        self.counters = Counters(earlier_steps=earlier_steps)
        self._first = True
        self.inside = HostSum(self.plan, self._setup, self.waiting)
        self.inside.skip(compressed_before)
        if self.gauge is not None:
            self.measure_noise()

    def measure_noise(self) -> None:
        """Measure from now on how much larger gradients come out than densely, where anything is
        compressed."""
        self.gauge = NoiseGauge(self.plan, self._setup.device) if self.plan.compressed else None

    @property
    def _in_levels(self) -> bool:
        """Whether ranks of a host add up before one message a host is sent."""
        return self.plan.info.ranks_per_host > 1

    @property
    def wire_bytes(self) -> int:
        """Bytes sent so far, all columns; where ranks of a host add up first, those to other
        hosts."""
        return self.counters.sent_bytes

    @property
    def compressed_wire_bytes(self) -> int:
        """Bytes sent so far for the columns that the policy compresses, warm-up included."""
        columns = sum(self.plan.dense_columns(s.params) for s in self.plan.compressed)
        if not columns:
            return 0
        words = sum(map(self.plan.sent_words, self.plan.compressed))
        all_words = sum(map(self.plan.sent_words, self.plan.segments))
        sent = self.counters
        return (
            int(sent.native_bytes * columns // self.plan.buffer_columns)
            + int(sent.message_bytes * words // all_words)
            + sent.other_bytes
        )

    @property
    def feedbacks(self) -> dict[int, SegmentFeedback]:
        """Of every segment, by its first column in the unit."""
        return self._in_unit(self.coder.feedbacks)

    @property
    def owner_feedbacks(self) -> dict[int, SegmentFeedback]:
        """Likewise, of the second of two shots; empty where there is none."""
        return {} if self.second is None else self._in_unit(self.second.coder.feedbacks)

    @property
    def codecs(self) -> dict[str, Codec[Any]]:
        """See :attr:`Coder.codecs`."""
        return self.coder.codecs

    def _in_unit(self, feedbacks: Mapping[int, SegmentFeedback]) -> dict[int, SegmentFeedback]:
        """By first column in the unit, what may be by that in a slice."""
        pairs = zip(self._encoded.segments, self.plan.segments, strict=True)
        return {whole.start: feedbacks[part.start] for part, whole in pairs}

    @property
    def _shares(self) -> dict[str, MeasuredShare]:
        """Where they are measured, by the first column of the segment in the unit."""
        return {str(i): f.share for i, f in self.feedbacks.items() if f.share is not None}

    @property
    def residuals(self) -> dict[int, Tensor]:
        """Residual ``[D, columns]`` by first column of the segment in the unit, to look at; in two
        shots ``[N, columns of a slice]``."""
        return _read(self.feedbacks)

    @property
    def owner_residuals(self) -> dict[int, Tensor]:
        """What this rank owes as the owner of a slice, ``[1, columns of a slice]``, likewise."""
        return _read(self.owner_feedbacks)

    @property
    def owner_states(self) -> dict[int, Tensor]:
        """What this rank keeps as the owner of its shard, ``[1, columns]``, likewise, where the
        feedback has such a state."""
        found = {i: f.owner_state for i, f in self.feedbacks.items()}
        return {i: state[None] for i, state in found.items() if state is not None}

    @contextmanager
    def open_residuals(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`residuals` to be changed in place."""
        with _opened(self.feedbacks) as residuals:
            yield residuals

    @contextmanager
    def open_owner_residuals(self) -> Iterator[dict[int, Tensor]]:
        """:attr:`owner_residuals` to be changed in place."""
        with _opened(self.owner_feedbacks) as residuals:
            yield residuals

    def selection_counts(self) -> list[SelectionCount]:
        """What codecs that select did so far, by segment. Waits for the device."""
        return self.coder.selection_counts()

    def rescale(self, factor: float | Tensor) -> None:
        """Expect gradients that are ``factor`` times as large, the same on every rank."""
        for share in self._shares.values():
            share.rescale(factor)
        with self.open_residuals() as residuals, self.open_owner_residuals() as owed:
            for stored in (*residuals.values(), *owed.values(), *self.owner_states.values()):
                stored.mul_(factor)
        for codec in self.codecs.values():
            for controller in codec.controllers:
                controller.rescale(factor)

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
        reached: Set[str] | None = None,
    ) -> None:
        """Write this rank's shard of the sum or average of all ranks' ``inp`` to ``out``; zeros if
        the gradient waits inside the host.

        Args:
            out: ``[S]``.
            inp: ``[W * S]``, row ``d`` for rank ``d``; across replicas ``[S]``, and all ranks get
                the same ``out``, which may be ``inp``.
            op: SUM or AVG; any, if the unit has nothing to compress.
            native: reduces units with nothing to compress, and all during the warm-up; default:
                the backend's own reduce-scatter.
            reached: names of the parameters whose columns these are, the same on every rank, if
                the backward did not reach all: see :mod:`tagc.comm.part`.

        Raises:
            RuntimeError: if buffer, group or operation are not what the plan was made for, before
                anything is sent; or if another rank does not answer in time.
        """
        part = None if reached is None else Part(self.plan, frozenset(reached))
        if self.plan.compressed:
            check_reduction(self.plan, part, out, inp, group, op)
        self._lockstep.part = 0 if part is None else part.mark
        if part is None:
            self._reduce_all(out, inp, group, op, native)
        elif part.compressed or (self._in_levels and self._stays_inside(group, op)):
            whole = part.expand(inp.view(-1, out.numel()))
            found = out.new_empty(self.plan.columns)
            with self._without(part, group):
                self._reduce_all(found, whole.view(-1), group, op, native, part)
            part.pick(found, out)
        else:
            # Room for everything would be mostly zeros, with nothing to compress in it.
            self._lockstep.check(group, 0, self.counters.all_steps)
            self.counters.steps += 1
            with failing_in(self._lockstep.what, group):
                self._reduce_densely(out, inp, None, group, op, native)

    def _reduce_all(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: Native | None,
        part: Part | None = None,
    ) -> None:
        """:meth:`reduce` of all columns; but for those of ``part`` they are zeros."""
        step = self.counters.all_steps
        compresses = bool(self.plan.compressed) and step >= self.plan.warmup_steps
        words = sum(stage.words for stage in self.plan.stages) if compresses else 0
        exchange = self._connect(group)
        in_levels = self._in_levels and self._can_add(group, op)
        grad = inp.view(-1, out.numel()) if compresses or in_levels else inp
        if in_levels:
            crosses = self._crosses()
            # A micro-batch that stays inside is no other host's matter.
            groups = exchange.groups if crosses else exchange.groups[:1]
            self._lockstep.announce(groups, words if crosses else 0, step)
            self._lockstep.confirm()
            what = self._lockstep.what
            grad = self.inside.add(grad, exchange, what, step=step, crosses=crosses, part=part)
            if not crosses:
                out.zero_()
                return
        else:
            self._lockstep.announce([group], words, step)
        self.counters.steps += 1
        with failing_in(self._lockstep.what, group):
            if compresses:
                self._reduce(out, grad, exchange, group, op)
            else:
                self._lockstep.confirm()
                self._reduce_densely(out, grad, exchange if in_levels else None, group, op, native)

    def _stays_inside(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> bool:
        """Whether the sum of a host's ranks waits, or meets what waits."""
        return self._can_add(group, op) and (bool(self.waiting) or not self._crosses())

    def _without(self, part: Part, group: dist.ProcessGroup) -> AbstractContextManager[None]:
        """Let wait what is owed for parameters that the backward did not reach."""
        if self.second is None:
            columns = {s.start: part.missing_columns(s) for s in self.plan.segments}
            debts = [Debt(f, columns[i], columns[i]) for i, f in self.feedbacks.items()]
        else:
            mask = part.missing_mask(self._setup.device).to(self.plan.info.dtype)
            rows, own = self.second.arrange(mask).bool(), group.rank()
            debts = []
            for slices, whole in zip(self._encoded.segments, self.plan.segments, strict=True):
                of = rows[:, slices.start : slices.stop]
                debts.append(Debt(self.feedbacks[whole.start], of, of[own]))
                debts.append(Debt(self.owner_feedbacks[whole.start], of[own : own + 1], of[own]))
        codecs = [c for c in self.codecs.values() if c.controllers]
        return set_aside(debts, [c for c in codecs if part.misses(c, self.plan.segments)])

    def _can_add(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> bool:
        """Whether hosts can have part of a reduction: of a unit with nothing compressed it may be
        one of any kind, which is left to the backend then, the same on all ranks."""
        plain = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if plain and group.size() == self.plan.info.world_size:
            return True
        self.inside.check_alike(op, group.size())
        return False

    def _reduce(
        self,
        out: Tensor,
        grad: Tensor,
        exchange: GroupExchange,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
    ) -> None:
        self.counters.compressed_steps += 1
        shard = out
        if self._flat is not None:
            grad, shard = self._flat.arrange(grad), self._flat.shard_buffer(out.dtype)
        if self.gauge is not None:
            own = grad[exchange.row if self.second is None else 0]
            self.gauge.look(own, self.counters.compressed_steps)
        if self.second is not None:
            grad, shard = self.second.arrange(grad), self.second.slice_sum()
        plan = self._encoded
        send, received = self._messages(plan, group)
        if self._first:
            # Only then does a codec exchange anything before its message.
            self._lockstep.confirm()
        # Codecs that a part left out begin in the next reduction.
        self._first = self._lockstep.part != 0
        divisor = plan.info.world_size if op == dist.ReduceOp.AVG else 1
        with record_function(f"TAGC::encode ({self._name})"):
            self.coder.encode(grad, send, exchange)
        with record_function(f"TAGC::exchange ({self._name})"):
            self._lockstep.confirm()
            work = exchange.send(received, send)
            self.coder.start(exchange)
            work.wait()
            self.coder.wait()
            self.counters.message_bytes += work.wire_bytes
        with record_function(f"TAGC::decode ({self._name})"):
            self.coder.decode(received, shard, exchange, divisor)
            self._lockstep.check_stamps(_stamps(received, plan), shard[:1])
            if self._flat is not None:
                self._flat.restore(shard, out, exchange.row)
        self.counters.other_bytes += exchange.wire_bytes
        if self.second is not None:
            self._hand_out(self.second, shard, out, group)
        if self.gauge is not None:
            handed = shard if self.second is None else out
            self.gauge.compare(handed, self.counters.compressed_steps, plan.sources / divisor)

    def _messages(self, plan: UnitPlan, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Room for the messages that a rank makes and for those that it gets, stamped."""
        take = self._workspace.take
        send = take("message_send", (plan.destinations, plan.row_words), torch.int32)
        received = take("message_recv", (plan.sources, plan.row_words), torch.int32)
        if plan.sent is None:  # the end of a message that is sent in part does not travel
            self._lockstep.stamp(_stamps(send, plan), group)
        return send, received

    def _hand_out(
        self, second: SecondShot, total: Tensor, out: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Second shot: send all replicas what this rank added up, and write what all owners did to
        ``out`` ``[S]``."""
        with record_function(f"TAGC::second shot ({self._name})"):
            send, received = self._messages(second.plan, group)
            second.encode(total, send)
            work = BroadcastExchange(group, self._workspace).send(received, send)
            work.wait()
            self.counters.message_bytes += work.wire_bytes
            second.decode(received, out)
            self._lockstep.check_stamps(_stamps(received, second.plan), out[:1])

    def _default_exchange(self, group: dist.ProcessGroup) -> GroupExchange:
        if self._encoded.for_all:
            return BroadcastExchange(group, self._workspace)
        return ShardExchange(group, self._workspace, self._encoded.sent)

    def state(self, *, noise: bool | None = None) -> dict[str, Tensor]:
        """What the next reduction and the counters depend on, beside the residuals; names and
        shapes never change. Waits for what is in flight.

        Args:
            noise: with measured noise, or without; by default if it is measured.
        """
        return state_of(self._parts(self.gauge is not None if noise is None else noise))

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise ValueError for values that :meth:`state` never has."""
        check_parts(self._parts(NoiseGauge.in_state(state)), state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken, given that it passes the check. If that has measured
        noise, measure on; if not, and noise is measured here, begin anew."""
        noise = NoiseGauge.in_state(state)
        if noise or self.gauge is not None:
            self.measure_noise()
        load_parts(self._parts(noise), state)

    def memory(self) -> Parts:
        """What codecs remember from step to step, beside residuals; not what was sent so far, nor
        the noise that was measured."""
        if self.inside.coder is not None:
            yield from ((f"inside.{name}", c) for name, c in self.inside.coder.codecs.items())
        yield from self.codecs.items()
        if self.second is not None:
            yield from ((f"second_shot.{name}", c) for name, c in self.second.coder.codecs.items())
        yield from ((f"share.{name}", share) for name, share in self._shares.items())

    def _parts(self, noise: bool) -> Parts:
        yield "", self.counters
        if self._in_levels:
            yield "", self.inside
        yield from self.memory()
        if noise and self.plan.compressed:
            yield "", self.gauge or NoiseGauge(self.plan, self._setup.device)

    def _reduce_densely(
        self,
        out: Tensor,
        grad: Tensor,
        levels: GroupExchange | None,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: Native | None,
    ) -> None:
        if levels is not None or self.plan.for_all:
            work = (levels or BroadcastExchange(group, self._workspace)).sum_dense(out, grad)
            work.wait()
            if op == dist.ReduceOp.AVG:
                out.div_(self.plan.info.world_size)
        else:
            work = (native or dense_reduce_scatter)(out, grad, group, op)
            work.wait()
        self.counters.native_bytes += work.wire_bytes


def _stamps(messages: Tensor, plan: UnitPlan) -> Tensor:
    """``[n, STAMP_WORDS]`` of messages ``[n, row_words]``."""
    return messages[:, plan.words : plan.words + STAMP_WORDS]


def _read(feedbacks: Mapping[int, SegmentFeedback]) -> dict[int, Tensor]:
    return {i: f.residual.read() for i, f in feedbacks.items() if f.residual is not None}


@contextmanager
def _opened(feedbacks: Mapping[int, SegmentFeedback]) -> Iterator[dict[int, Tensor]]:
    with ExitStack() as stack:
        yield {
            i: stack.enter_context(f.residual.opened())
            for i, f in feedbacks.items()
            if f.residual is not None
        }
