"""An all-gather from a copy: ranks send each other changes once per optimizer step, and otherwise
read the copy that they keep.

The ranks of a host share one copy: each keeps the shards of the ranks with its own place on all
hosts, and exchanges messages with these ranks. In every all-gather the ranks of a host exchange
their rows. With one rank on a host, every rank keeps all rows, and sends nothing but the messages.

All ranks must know without communication when a message is due. It is due in the first forward
after a step of an optimizer that holds any of the unit's parameters; every rank sees such steps. If
the step calls a closure, it is also due in the first forward of every call. Until an optimizer's
step was seen (the optimizer may not be torch's), a message is due after each reduction of the
unit's gradients.

The size of an exact message depends on the parameters. The first unit that is gathered after a step
measures the messages of all units that have one due, and ranks agree on all sizes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from tagc.basics.warn import warn
from tagc.collect.alarm import Alarm
from tagc.collect.gatherer import GatherSetup, Phase, UnitGatherer, squared_norms
from tagc.plan.gathers import Gathers


class CopyGatherer(UnitGatherer):
    """Keeps a copy and sends changes. See :class:`UnitGatherer`."""

    def __init__(
        self,
        setup: GatherSetup,
        *,
        reductions: Callable[[], int],
        versions: Callable[[], int],
        shard: Callable[[], Tensor],
        alike: list[CopyGatherer],
    ) -> None:
        """Start without a copy.

        Args:
            reductions: returns how often the unit's gradients have left this host; the same on all
                ranks.
            versions: returns torch's count of writes to the unit's parameters.
            shard: returns what FSDP would gather now, ``[S]``.
            alike: gatherers of the same ranks that agree on sizes together; this one adds itself.
        """
        super().__init__(setup)
        programs = self._programs
        sizes = () if programs.sizes is None else (programs.sizes,)
        self._declare(programs.whole, *sizes, programs.changes, programs.read, programs.read_early)
        self._lossy = any(s.codec.of_changes and not s.codec.exact for s in self.plan.segments)
        self._own_row = self.copy[self._own]
        self._fingerprint = self.store[programs.fingerprint]
        self._reductions, self._versions, self._shard = reductions, versions, shard
        self._alike = alike
        if sizes:
            alike.append(self)
        # Whether this rank's row of the copy is known, and whether the others are.
        self._knows_own = self._knows_others = False
        self._due = False
        # What was measured of each segment whose messages vary, of the message that is due; empty
        # until ranks agree on it.
        self._agreed: list[int] = []
        # Whether an optimizer's step was seen.
        self._sees_steps = False
        self._reductions_then = 0
        # The count after the last step seen here; None after loading a state.
        self._versions_then: int | None = None
        self._by_others = Alarm(
            f"tagc: the parameters of unit {self._name!r} changed, but not by an optimizer's step "
            "(other weights loaded or swapped in?), and its codec sends changes only after "
            "such a step: call tagc.compressor(model).refresh() on all ranks whenever parameters "
            "are changed by other means, such as eval() and train() of a schedule-free optimizer. "
            "If a CUDA graph holds the step, call before_replay() before every replay",
            self.store,
            programs.changed,
        )
        self._since_forward = Alarm(
            f"tagc: the parameters of unit {self._name!r} changed between a forward and its "
            "backward (by an optimizer's step, or by loading weights). FSDP would gather them "
            "again, but its codec sends nothing in backward: change parameters after "
            "the backward",
            self.store,
            programs.changed_early,
        )

    @property
    def copy(self) -> Tensor:
        """The parameters as all other ranks know them, ``[H, S]``; row ``h`` is the shard of rank
        ``h * R + r``, where ``r`` is this rank's place on its host."""
        return self.store[self._programs.copy]

    def note_step(self, *, ended: bool) -> None:
        """Note a step of an optimizer that holds any of the unit's parameters. All ranks call it
        together.

        Args:
            ended: whether the step is over; False if it still changes parameters.
        """
        self._due = self._sees_steps = True
        self._agreed = []
        self._versions_then = self._versions() if ended else None

    def note_forward(self) -> None:
        """See :meth:`UnitGatherer.note_forward`. The copy serves every forward."""

    def refresh(self) -> None:
        self._knows_own = False
        self._agreed = []
        self._by_others.reset()
        self._since_forward.reset()

    @property
    def _is_due(self) -> bool:
        reduced = self._reductions() != self._reductions_then
        return self._due or not self._knows_own or (reduced and not self._sees_steps)

    @property
    def sends_ahead(self) -> bool:
        return self._is_due or not self._knows_others

    @property
    def has_read(self) -> bool:
        return any(program is self._programs.read for _, program in self._replays)

    def _check_alarms(self) -> None:
        self._by_others.check()
        self._since_forward.check()

    def _gather(self, out: Tensor, inp: Tensor, phase: Phase) -> None:
        self._check_alarms()
        programs = self._programs
        # A backward reads the same copy as its forward. So do forwards that it recomputes.
        reads_as_is = self._knows_others and (phase is Phase.BACKWARD or _in_backward())
        if self._knows_own and not self._knows_others and not self._capturing:
            # This completes load_state; its bytes are not counted as a step's.
            self._replay(programs.rows).run({})
            self._knows_others = True
        if reads_as_is or not self._is_due:
            # Sending changes here is not possible: other ranks would not know to receive them.
            early = reads_as_is and self._is_due
            self._run(programs.read_early if early else programs.read, out, inp)
            (self._since_forward if early else self._by_others).note()
            return
        if self._capturing:
            raise RuntimeError(
                f"tagc: a CUDA graph cannot hold the changes of unit {self._name!r}, sent "
                "once per optimizer step: call tagc.compressor(model).before_capture() right "
                "before the capture, which sends them, and let the graph hold one step"
            )
        ahead = phase is Phase.AHEAD
        if self._knows_own:
            self._warn_of_others()
            programs = self._fitting(inp)
        if self._knows_own and (programs.sizes is None or programs.saves):
            self._run(programs.changes_ahead if ahead else programs.changes, out, inp)
        else:
            self._run(programs.whole_ahead if ahead else programs.whole, out, inp)
            self._knows_own = self._knows_others = True
        self._due, self._agreed, self._reductions_then = False, [], self._reductions()
        if self._programs.sizes is not None:
            self._by_others.note()  # of a change after it was measured

    def _fitting(self, inp: Tensor) -> Gathers:
        """The programs for the next message. If its size varies, all ranks choose by the largest
        one, and wait for it if they have not agreed on it yet."""
        if self._programs.sizes is None:
            return self._programs
        if not self._agreed:
            self._agree(inp)
        return self._programs.fitted(self._agreed)

    def _agree(self, inp: Tensor) -> None:
        """Agree on the sizes of this unit's message and of all others that are due. Waits for the
        device, so later gathers may use what was measured on any stream."""
        others = [g for g in self._alike if g is not self and g._can_be_measured]
        mine = [self._measured(inp), *(g._measured(g._shard()) for g in others)]
        sizes = self._largest(torch.cat(mine)).tolist()
        for gatherer, words in zip((self, *others), mine, strict=True):
            gatherer._agreed, sizes = sizes[: len(words)], sizes[len(words) :]

    @property
    def _can_be_measured(self) -> bool:
        # A step that no hook sees may follow before the gather, and nothing would say so.
        return self._due and self._sees_steps and self._knows_own and not self._agreed

    def _warn_of_others(self) -> None:
        """Warn if the parameters were written to after the optimizer's step. (If you clip or
        normalize weights in every step, that is fine: the difference includes it.)"""
        if self._lossy and self._due and self._versions_then not in (None, self._versions()):
            _warn_of_others()

    def state(self) -> dict[str, Tensor]:
        """See :meth:`UnitGatherer.state`. Of the copy it holds this rank's row only."""
        flags = [self._knows_own, self._is_due, self._sees_steps]
        return super().state() | {
            "copy": self._own_row,
            "copy_flags": torch.tensor(flags, dtype=torch.int64, device="cpu"),
            "copy_fingerprint": self._fingerprint,
        }

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        super().check_state(state)
        if not bool(((state["copy_flags"] == 0) | (state["copy_flags"] == 1)).all()):
            raise ValueError("a flag of the copy is neither 0 nor 1")

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`UnitGatherer.load_state`. The next forward gathers the rows of the others."""
        super().load_state(state)
        self._own_row.copy_(state["copy"])
        self._knows_own, self._due, self._sees_steps = map(bool, state["copy_flags"].tolist())
        self._knows_others = False
        self._reductions_then, self._versions_then = self._reductions(), None
        self._agreed = []
        self._by_others.reset()
        self._since_forward.reset()
        self._fingerprint.copy_(state["copy_fingerprint"])

    def relative_error(self, shard: Tensor) -> tuple[float, float]:
        return super().relative_error(shard) if self._knows_own else squared_norms(shard, shard)


@cache
def _warn_of_others() -> None:
    warn(
        "parameters were changed after the optimizer's step and before the next forward. A codec "
        "'delta' sends all changes as one difference, and the larger it is, the coarser: if other "
        "weights were loaded or swapped in, call tagc.compressor(model).refresh() on all ranks"
    )


def _in_backward() -> bool:
    """Whether autograd is running a backward now. torch's activation checkpointing checks the
    same way."""
    return torch._C._current_graph_task_id() != -1
