"""Reduces one unit's gradients, from FSDP's buffer to this rank's shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from tagc.codecs.workspace import Workspace
from tagc.collect.flat import flat_rows
from tagc.collect.hosts import HostGroups
from tagc.collect.part import Part
from tagc.collect.reducer_state import ReducerState
from tagc.collect.reduction_check import check_reduction, refuse_others
from tagc.collect.set_aside import set_aside
from tagc.collect.stage import Call, ReduceNatively
from tagc.collect.transport import Connect, Transport, failing_in
from tagc.ops import Ops
from tagc.plan import UnitPlan


class UnitReducer(ReducerState):
    """Leads the gradient buffer of one unit through the stages of its plan.

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
        self._across = None if hosts is None else connect(hosts.across)
        self._flat = flat_rows(plan, workspace)
        inside = None if hosts is None else connect(hosts.inside)
        super().__init__(plan, ops, device, workspace, seed=seed, rank=rank, inside=inside)

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
                did not reach all of them; see :mod:`tagc.collect.part`.

        Raises:
            RuntimeError: if the plan was made for another buffer, group or operation (nothing is
                sent then), or if another rank does not answer in time.
        """
        for _ in self.reducing(out, inp, group, op, native, reached):
            pass

    def reducing(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        native: ReduceNatively | None = None,
        reached: Set[str] | None = None,
    ) -> Iterator[None]:
        """:meth:`reduce` as a generator, which pauses while messages are in flight. Meanwhile
        other units may be reduced, if these have another workspace."""
        plan = self.plan
        if self.before is not None:
            self.before(self.counters.all_steps)
        part = None if reached is None else Part(plan, frozenset(reached))
        if plan.compressed:
            check_reduction(plan, part, out, inp, group, op)
        on_hosts = self._adds_inside(group, op)
        stays = on_hosts and not self._crosses()
        # If the part has nothing compressed, expanding it to all columns would send mostly zeros.
        whole = part is None or part.compressed or stays or (on_hosts and bool(self.waiting))
        on_hosts = on_hosts and whole
        warm = self.counters.all_steps >= plan.warmup_steps
        call = Call(
            transport=self._across if on_hosts and self._across else self._connect(group),
            op=op,
            divisor=plan.info.world_size if op == dist.ReduceOp.AVG else 1,
            compresses=bool(plan.compressed) and warm and whole,
            on_hosts=on_hosts,
            part=0 if part is None else part.mark,
            native=native,
        )
        if part is None or not whole:
            yield from self._run(out, inp, group, call, None, stays=stays)
            return
        received = plan.received_rows
        rows = part.expand(inp.view(plan.rows, -1))
        # In place where all ranks get all rows, as `ReduceNatively` says.
        found = rows if plan.all_reduced else out.new_empty(received * plan.columns)
        with self._without(part, call.transport.rank):
            yield from self._run(found.view(-1), rows.view(-1), group, call, part, stays=stays)
        pairs = zip(found.view(received, -1), out.view(received, -1), strict=True)
        for whole_row, row in pairs:
            part.pick(whole_row, row)

    def _run(
        self,
        out: Tensor,
        inp: Tensor,
        group: dist.ProcessGroup,
        call: Call,
        part: Part | None,
        *,
        stays: bool,
    ) -> Iterator[None]:
        """:meth:`reducing` for buffers with all columns; columns outside ``part`` are zero.

        Args:
            stays: whether the host's sum waits instead of being sent.
        """
        plan, lockstep, step = self.plan, self._lockstep, self.counters.all_steps
        words = plan.words if call.compresses else 0
        rows = inp.view(plan.rows, -1) if call.compresses or call.on_hosts else inp
        average = out
        if not call.on_hosts:
            transports = [call.transport] if self.announces else []
            lockstep.announce(transports, words, step, call.part)
        else:
            assert self.inside is not None
            # Other hosts take no part in a micro-batch that stays inside.
            across = [] if stays else [call.transport]
            words = 0 if stays else words
            lockstep.announce([*self.inside.transports, *across], words, step, call.part)
            lockstep.confirm()
            total = self.inside.room(rows)
            self.inside.run(rows, total, call)
            if stays:
                self.waiting.add(total, part)
                out.zero_()
                return
            self.waiting.hand_over(total, part)
            rows = total
            if plan.all_reduced:
                average = self.inside.room_for_average(rows)
        self.counters.steps += 1
        with failing_in(lockstep.what, group):
            if call.compresses:
                yield from self._send_messages(average, rows, call)
            else:
                lockstep.confirm()
                own = call.on_hosts or (plan.for_all and call.native is None)
                stage = self._sum if own else self._native
                stage.run(rows, average, call)
            if average is not out and self.inside is not None:
                self.inside.hand_on(average, out)

    def _send_messages(self, out: Tensor, rows: Tensor, call: Call) -> Iterator[None]:
        self.counters.compressed_steps += 1
        step, row, shard = self.counters.compressed_steps, call.transport.rank, out
        if self._flat is not None:
            rows, shard = self._flat.arrange(rows), self._flat.shard_buffer(out.dtype)
        if self.gauge is not None:
            self.gauge.look(rows[0 if self.plan.for_all else row], step)
        yield from self.messages.running(rows, shard, call)
        if self.gauge is not None:
            self.gauge.compare(shard, step, self.plan.peers / call.divisor)
        if self._flat is not None:
            self._flat.restore(shard, out, row)

    def _adds_inside(self, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> bool:
        """Whether ranks of a host add up first, the same on all ranks. A unit with nothing
        compressed may be reduced with any operation over any group; then the backend does it."""
        if self.inside is None:
            return False
        known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        if known and group.size() == self.plan.info.world_size:
            return True
        if self.waiting:
            refuse_others(self.plan, op, group.size())
        return False

    def _without(self, part: Part, rank: int) -> AbstractContextManager[None]:
        """Preserve the feedback state of parameters that the backward did not reach."""
        codecs = [c for c in self.coder.codecs.values() if c.controllers]
        missing = [c for c in codecs if part.misses(c, self.plan.segments)]
        return set_aside(self.messages.debts(part, rank), missing)
