"""An all-gather from a copy: ranks tell each other what changed, once for every step of the
optimizer, and read all else from the copy that they keep.

With several ranks on a host these have one copy between them, each the rows of those with its own
place on all hosts; a rank exchanges messages with these, and the host's ranks tell each other their
rows in every all-gather. Else every rank has all rows, and after a message nothing is sent.

When a message is due, all ranks must know without asking. It is due in the first forward after an
optimizer stepped that holds any of the unit's parameters, which every rank sees; and in the first
one of every call of a closure in such a step. While none has been seen (it may be none of torch's),
it is due after a reduction of the unit's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from tagc.basics.warn import warn
from tagc.collect.alarm import Alarm
from tagc.collect.exchange import Broadcast
from tagc.collect.fingerprint import fingerprint
from tagc.collect.gatherer import GatherSetup, Phase, UnitGatherer, squared_norms
from tagc.collect.host_copy import HostCopy
from tagc.collect.transport import failing_in


class CopyGatherer(UnitGatherer):
    """Keeps a copy and sends changes. See :class:`UnitGatherer`.

    Attributes:
        copy: what all ranks believe the parameters to be.
    """

    def __init__(
        self,
        setup: GatherSetup,
        *,
        rank: int,
        reductions: Callable[[], int],
        versions: Callable[[], int],
    ) -> None:
        """New state.

        Args:
            rank: of this process in the unit's group.
            reductions: how often the unit's gradients left this host so far; the same on all ranks.
            versions: a number that grows when anybody writes to the unit's parameters, as far as
                torch counts that.
        """
        super().__init__(setup)
        self.copy = HostCopy(setup, own=rank // self.plan.info.ranks_per_host)
        self._reductions, self._versions = reductions, versions
        # Whether rows of the copy are known: this rank's own one, and those of the others.
        self._knows_own = self._knows_others = False
        self._due = False
        # Whether any optimizer was seen to step.
        self._sees_steps = False
        self._reductions_then = 0
        # After the last step that was seen here; none after a load.
        self._versions_then: int | None = None
        self._fingerprint = torch.zeros(2, dtype=torch.int64, device=setup.device)
        self._by_others = Alarm(
            f"tagc: the parameters of unit {self._name!r} changed, but not by an optimizer's step "
            "(other weights loaded or swapped in?), and a codec 'delta' sends changes only after "
            "such a step: call tagc.compressor(model).refresh() on all ranks whenever parameters "
            "are changed by other means, such as eval() and train() of a schedule-free optimizer"
        )
        self._since_forward = Alarm(
            f"tagc: the parameters of unit {self._name!r} are others in a backward than in its "
            "forward (an optimizer's step, or weights loaded in between). FSDP would gather them "
            "again, but with a codec 'delta' nothing is sent in backward: change parameters after "
            "the backward"
        )

    def note_step(self, *, ended: bool) -> None:
        """An optimizer steps that holds any of the unit's parameters; all ranks call it together.

        Args:
            ended: whether it changes nothing any more in this step.
        """
        self._due = self._sees_steps = True
        self._versions_then = self._versions() if ended else None

    def note_forward(self) -> None:
        """See :meth:`UnitGatherer.note_forward`: the copy serves any."""

    def refresh(self) -> None:
        """See :meth:`UnitGatherer.refresh`."""
        self._knows_own = False
        self._by_others.reset()
        self._since_forward.reset()

    @property
    def _is_due(self) -> bool:
        reduced = self._reductions() != self._reductions_then
        return self._due or not self._knows_own or (reduced and not self._sees_steps)

    def _gather(self, rows: Tensor, inp: Tensor, group: dist.ProcessGroup, phase: Phase) -> None:
        """See :meth:`UnitGatherer._gather`."""
        self._by_others.check()
        self._since_forward.check()
        exchange = self._broadcast(group)
        # A backward reads what its forward did, and so do forwards that it does once more.
        reads_as_is = self._knows_others and (phase is Phase.BACKWARD or _in_backward())
        if not self._knows_others and self._knows_own:
            # A part of loading a state, whose bytes no step has sent.
            self._send_rows(exchange, group)
        changed = None
        if not reads_as_is and self._is_due:
            if self._knows_own:
                self._warn_of_others()
                self._send_change(inp, exchange, group)
            else:
                self.copy.rows[self.copy.own].copy_(inp)
                self.wire_bytes += self._send_rows(exchange, group)
            self._due, self._reductions_then = False, self._reductions()
            self._fingerprint.copy_(fingerprint(inp))
        else:
            # Nothing leaves the host.
            self._lockstep.announce(exchange.transports[:-1], 0)
            self._lockstep.confirm()
            changed = (fingerprint(inp) != self._fingerprint).any()
        self._share(rows, exchange, group)
        if changed is not None:
            # To send them is no way out: other ranks may not know that they have to receive.
            alarm = self._since_forward if reads_as_is and self._is_due else self._by_others
            alarm.note(changed, rows[:, :1])

    def _warn_of_others(self) -> None:
        """Say so if anybody wrote to the parameters after the optimizer. (Who clips or normalizes
        weights in every step may do that: it is a difference like the optimizer's.)"""
        if self._due and self._versions_then not in (None, self._versions()):
            _warn_of_others()

    def _send_rows(self, exchange: Broadcast, group: dist.ProcessGroup) -> int:
        """Give this rank's row to all who keep it, as it is; the bytes sent."""
        rows, own = self.copy.rows, self.copy.own
        self._lockstep.announce(exchange.transports, rows.shape[1])
        self._lockstep.confirm()
        with failing_in(self._lockstep.what, group):
            work = exchange.send_across(rows, rows[own : own + 1])
            work.wait()
        self._knows_own = self._knows_others = True
        return work.wire_bytes

    def _send_change(self, inp: Tensor, exchange: Broadcast, group: dist.ProcessGroup) -> None:
        words, take = self.plan.messages.row_words, self._workspace.take
        send = take("parameters_send", (1, words), torch.int32)
        received = take("parameters_recv", (self.plan.peers, words), torch.int32)
        self._lockstep.announce(exchange.transports, words)
        with record_function(f"TAGC::encode parameters ({self._name})"):
            self.copy.encode(inp, send)
        with (
            record_function(f"TAGC::gather parameters ({self._name})"),
            failing_in(self._lockstep.what, group),
        ):
            self._lockstep.confirm()
            work = exchange.send_across(received, send)
            work.wait()
        self.wire_bytes += work.wire_bytes
        with record_function(f"TAGC::decode parameters ({self._name})"):
            self.copy.decode(received, self.copy.rows)

    def _share(self, rows: Tensor, exchange: Broadcast, group: dist.ProcessGroup) -> None:
        with (
            record_function(f"TAGC::share parameters inside the host ({self._name})"),
            failing_in(self._lockstep.what, group),
        ):
            exchange.share(rows, self.copy.rows)
        self.inside_bytes += exchange.inside_bytes

    def state(self) -> dict[str, Tensor]:
        """See :meth:`UnitGatherer.state`: this rank's row of the copy; the others have theirs."""
        flags = [self._knows_own, self._is_due, self._sees_steps]
        return super().state() | {
            "copy": self.copy.rows[self.copy.own],
            "copy_flags": torch.tensor(flags, dtype=torch.int64, device="cpu"),
            "copy_fingerprint": self._fingerprint,
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UnitGatherer.check_state`."""
        super().check_state(state)
        if not bool(((state["copy_flags"] == 0) | (state["copy_flags"] == 1)).all()):
            raise ValueError("a flag of the copy is neither 0 nor 1")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UnitGatherer.load_state`. The next forward gathers the rows of the others."""
        super().load_state(state)
        self.copy.rows[self.copy.own].copy_(state["copy"])
        self._knows_own, self._due, self._sees_steps = map(bool, state["copy_flags"].tolist())
        self._knows_others = False
        self._reductions_then, self._versions_then = self._reductions(), None
        self._by_others.reset()
        self._since_forward.reset()
        self._fingerprint.copy_(state["copy_fingerprint"])

    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        """See :meth:`UnitGatherer.relative_error`: what a message about it now would leave out."""
        if not self._knows_own:
            return squared_norms(shard, shard)
        message = torch.empty(1, self.plan.words, dtype=torch.int32, device=shard.device)
        decoded = self.copy.rows[self.copy.own][None].clone()
        self.copy.encode(shard, message)
        self.copy.decode(message, decoded)
        return squared_norms(decoded[0], shard)


@cache
def _warn_of_others() -> None:
    warn(
        "parameters were changed after the optimizer's step and before the next forward. With a "
        "codec 'delta' what changed goes as one difference, as coarse as it is large: if other "
        "weights were loaded or swapped in, call tagc.compressor(model).refresh() on all ranks"
    )


def _in_backward() -> bool:
    """Whether autograd runs a backward now, as torch's own checkpoints find out."""
    return torch._C._current_graph_task_id() != -1
